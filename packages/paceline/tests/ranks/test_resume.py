"""The rest of an interrupted run has the losses of one that never stopped: bit by bit at the same layout, and within the
parity tolerance at another width, whatever stands behind the loader."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from paceline import Accelerator
from paceline.base.errors import DataError
from paceline.testing import RankFailed, run_ranks

ROWS, BATCH, EPOCHS, STOP = 26, 2, 2, 3  # a global batch of 6 at the width of three that saves: 4 full ones and a tail
rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


class Augmented(Dataset):
    """Noise from every source that augmentations draw from."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return rows[index] + 0.1 * torch.randn(3) + 0.1 * random.random() + 0.1 * float(np.random.rand())


class Own(Sampler):
    """An order of its own, from the global generator."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows


class Stateful(Stream):
    """A stream that goes on where its state says."""

    def __init__(self):
        self.place = self.read = 0

    def __iter__(self):
        place, self.place = self.place, 0
        for number in range(place, ROWS):
            self.read = number + 1
            yield rows[number]

    def state_dict(self):
        return {"place": self.read}

    def load_state_dict(self, state):
        self.place = state["place"]


class Splitting(Stream):
    """A stream that splits itself."""

    def __iter__(self):
        info = get_worker_info()
        yield from rows[info.id :: info.num_workers] if info else rows


def loader_of(kind: str, workers: int) -> DataLoader:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers == 2}
    if kind == "batches":
        return DataLoader(TensorDataset(rows), batch_sampler=BatchSampler(Own(), BATCH, False), **options)
    if kind == "own batches":

        class Buckets(BatchSampler):
            def __iter__(self):
                order = torch.randperm(ROWS).tolist()
                yield from (order[at : at + size] for at, size in zip(range(0, ROWS, 2), [2] * 13, strict=True))

        return DataLoader(TensorDataset(rows), batch_sampler=Buckets(Own(), BATCH, False), **options)
    data = {"augmented": Augmented, "stream": Stream, "stateful": Stateful, "splitting": Splitting}
    dataset = data[kind]() if kind in data else TensorDataset(rows)
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, BATCH, **options)
    return DataLoader(
        dataset, BATCH, sampler=Own() if kind == "sampler" else None, shuffle=kind != "sampler", **options
    )


def train(
    folder: str | None, kind: str, workers: int = 0, dispatch: bool = False, accumulate: int = 1, stop: int = 0
) -> list[float]:
    """Losses by micro-batch, as means over the real samples of all ranks; `stop` saves in the body of that micro-batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, data_seed=2, project_dir=folder, dispatch_batches=dispatch, gradient_accumulation_steps=accumulate
    )
    loader = loader_of(kind, workers)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start, losses = accelerator.resume(), []
    for _ in range(start.epoch, EPOCHS):
        for batch in loader:
            x = batch if isinstance(batch, torch.Tensor) else batch[0]
            with accelerator.accumulate(model):
                each = model(x).square().flatten()
                accelerator.backward(each.mean())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(each.detach()).mean().item())
            if stop and len(losses) == stop:
                accelerator.save_state()
                return losses
    return losses


@cache
def whole(*case: Any) -> list[float]:
    """What a run on three ranks that nothing disturbs has."""
    return run_ranks(train, 3, args=(None, *case))[0]


def close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5)


# Loader, workers, whether rank 0 reads for all, accumulation; then where the rest runs: width and workers.
CASES = {
    "shuffled": (("shuffled", 0, False, 1), (4, 1)),
    "workers": (("shuffled", 2, False, 1), (2, 0)),
    "sampler": (("sampler", 0, False, 1), (1, 0)),
    "batch sampler": (("batches", 0, False, 1), (4, 0)),
    "own batch sampler": (("own batches", 2, False, 1), (2, 1)),
    "augmented": (("augmented", 2, False, 1), (2, 1)),
    "stream": (("stream", 0, False, 1), (4, 0)),
    "stream, workers": (("stream", 2, False, 1), (2, 1)),
    "stateful": (("stateful", 0, False, 1), (1, 2)),
    "stateful, workers": (("stateful", 2, False, 1), (4, 0)),
    "dispatched": (("shuffled", 0, True, 1), (4, 0)),
    "dispatched stream": (("stream", 0, True, 1), (2, 0)),
    "accumulated": (("shuffled", 0, False, 2), (2, 0)),
}


@pytest.mark.parametrize(("case", "then"), CASES.values(), ids=CASES)
def test_the_rest_has_the_same_losses(tmp_path, case, then):
    kind, _, *ways = case
    expected = whole(*case)
    stop = STOP + ways[1] - 1
    assert run_ranks(train, 3, args=(str(tmp_path), *case, stop))[0] == expected[:stop]
    assert run_ranks(train, 3, args=(str(tmp_path), *case))[0] == expected[stop:]
    width, workers = then
    assert close(run_ranks(train, width, args=(str(tmp_path), kind, workers, *ways))[0], expected[stop:])


def test_hosts_that_leave_and_come_back(tmp_path):
    """Three ranks, two, three: the global batch is that of the beginning throughout, over the end of an epoch too."""
    case = ("shuffled", 0, False, 1)
    losses = []
    for width, stop in ((3, 2), (2, 2), (3, 3), (1, 0)):
        losses += run_ranks(train, width, args=(str(tmp_path), *case, stop))[0]
    assert close(losses, whole(*case))


def test_a_dataset_that_splits_itself_goes_on_only_as_it_began(tmp_path):
    case = ("splitting", 2, False, 1)
    expected = whole(*case)
    first = run_ranks(train, 3, args=(str(tmp_path), *case, 2))[0]
    assert first + run_ranks(train, 3, args=(str(tmp_path), *case))[0] == expected
    for width, workers in ((2, 2), (3, 1), (1, 0)):
        with pytest.raises(RankFailed) as caught:
            run_ranks(train, width, args=(str(tmp_path), "splitting", workers, False, 1))
        assert isinstance(caught.value.__cause__, DataError) and "data-reshard" in str(caught.value.__cause__)


def test_a_stream_whose_batches_cannot_stay_as_they_are(tmp_path):
    run_ranks(train, 3, args=(str(tmp_path), "stream", 0, True, 1, 2))
    with pytest.raises(RankFailed, match="data-reshard"):
        run_ranks(train, 4, args=(str(tmp_path), "stream", 0, True, 1))


class Rewinds(IterableDataset):
    """Goes back to its beginning when it ends; `passes` counts how often it was read to its end."""

    def __init__(self) -> None:
        self.place = self.passes = 0

    def __iter__(self):
        while self.place < 7:
            self.place += 1
            yield torch.tensor([float(10 * self.passes + self.place)])
        self.place = 0
        self.passes += 1

    def state_dict(self):
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state):
        self.place, self.passes = state["place"], state["passes"]


def values_after_an_epoch(folder: str, resumed: bool) -> list[list[float]]:
    """The values of each epoch, on all ranks; the run is saved in the body of the last step of the first epoch."""
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rewinds(), 2))
    if resumed:
        accelerator.resume()
    epochs: list[list[float]] = []
    for _ in range(3):
        values: list[float] = []
        for steps, batch in enumerate(loader, 1):
            values += accelerator.gather_for_metrics(batch.flatten()).tolist()
            if not resumed and not epochs and steps == (4 if accelerator.num_processes == 1 else 2):
                accelerator.save_state()
        epochs.append(values)
    return epochs


@pytest.mark.parametrize("world", [1, 2])
def test_a_stateful_stream_that_was_saved_at_the_end_of_an_epoch(world: int, tmp_path: Path) -> None:
    undisturbed = run_ranks(values_after_an_epoch, world, args=(str(tmp_path), False))[0]
    resumed = run_ranks(values_after_an_epoch, world, args=(str(tmp_path), True))[0]
    assert [len(values) for values in undisturbed] == [7, 7, 7]
    assert resumed[:2] == [[], undisturbed[1]], (undisturbed, resumed)
