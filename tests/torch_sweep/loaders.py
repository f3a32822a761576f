"""Every sampler of torch.utils.data, every option of its DataLoader, and every kind of data set.

A case is a loader over numbered samples. Read through `Accelerator`, the numbers that all ranks get together in each step must
be those of a plain DataLoader on one process, in its order, over two epochs; and also if the run is saved in the middle of the
second epoch and resumed.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks

ROWS, BATCH, EPOCHS = 20, 6, 2
SAVED_AT = 2  # steps in the last epoch
Steps = list[list[int]]  # the numbers of each step


@dataclass(frozen=True)
class Case:
    """One loader.

    Attributes:
        name: what is special in it.
        build: makes the loader. A sample is its number, as a tensor.
        most: steps of an epoch after which the loop breaks; None to read to the end.
        split: whether the batch size is that of all ranks together. Otherwise a step has a batch of each rank, and the order of
            the samples is compared, not the steps.
    """

    name: str
    build: Callable[[], data.DataLoader[Any]]
    most: int | None = None
    split: bool = True


class Numbers(data.Dataset[Tensor]):
    """The numbers below `length`, one by one."""

    def __init__(self, length: int = ROWS, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.first + range(self.length)[index])


class Fetched(Numbers):
    """Gives a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Stream(data.IterableDataset[Tensor]):
    """The numbers below `length`; workers share them."""

    def __init__(self, length: int | None = ROWS, first: int = 0) -> None:
        self.length, self.first = length, first

    def __iter__(self) -> Iterator[Tensor]:
        number = 0
        while self.length is None or number < self.length:
            yield torch.tensor(self.first + number)
            number += 1


class Measured(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class OwnSampler(data.Sampler[int]):
    """Draws from the global generator, as scripts' own samplers do, and has no length."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(ROWS).tolist()


class Endless(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield from torch.randperm(ROWS, generator=generator).tolist()


class Uneven(data.Sampler[list[int]]):
    """Batches of several sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9, 10], [11])

    def __len__(self) -> int:
        return 5


class EndlessBatches(data.Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        while True:
            yield [(first + number) % ROWS for number in range(BATCH)]
            first += BATCH


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def join(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"number": torch.stack(samples), "negative": -torch.stack(samples)}


def prepare_worker(worker: int) -> None:
    torch.manual_seed(worker)


def of(name: str, dataset: Callable[[], Any] = Numbers, most: int | None = None, **options: Any) -> Case:
    """A case whose loader has these options; values that are functions without arguments are called for each loader."""
    options = {"batch_size": BATCH, **options}

    def build() -> data.DataLoader[Any]:
        made = {key: value() if key in MADE else value for key, value in options.items()}
        if made["batch_size"] == BATCH and "batch_sampler" in made:
            del made["batch_size"]
        return data.DataLoader(dataset(), **made)

    split = options["batch_size"] == BATCH or (options["batch_size"] is None and "sampler" in options)
    return Case(name, build, most, split)


MADE = {"sampler", "batch_sampler", "generator"}
WEIGHTS = torch.arange(1.0, ROWS + 1)
WORKERS = {"num_workers": 2}

SAMPLERS = [
    of("no sampler"),
    of("shuffle", shuffle=True),
    of("SequentialSampler", sampler=lambda: data.SequentialSampler(Numbers())),
    of("RandomSampler", sampler=lambda: data.RandomSampler(Numbers())),
    of("RandomSampler(generator)", sampler=lambda: data.RandomSampler(Numbers(), generator=seeded())),
    of("RandomSampler(replacement)", sampler=lambda: data.RandomSampler(Numbers(), replacement=True)),
    of("RandomSampler(num_samples=33)", sampler=lambda: data.RandomSampler(Numbers(), num_samples=33)),
    of(
        "RandomSampler(replacement, num_samples=10**8)",
        sampler=lambda: data.RandomSampler(Numbers(), replacement=True, num_samples=10**8),
        most=4,
    ),
    of("SubsetRandomSampler", sampler=lambda: data.SubsetRandomSampler([1, 5, 7, 9, 11, 13, 17])),
    of("SubsetRandomSampler(generator)", sampler=lambda: data.SubsetRandomSampler(range(3, 16), generator=seeded())),
    of("WeightedRandomSampler", sampler=lambda: data.WeightedRandomSampler(WEIGHTS, 17)),
    of(
        "WeightedRandomSampler(replacement=False, generator)",
        sampler=lambda: data.WeightedRandomSampler(WEIGHTS, 17, replacement=False, generator=seeded()),
    ),
    of(
        "WeightedRandomSampler(num_samples=10**7)",
        sampler=lambda: data.WeightedRandomSampler(WEIGHTS, 10**7),
        most=4,
    ),
    of(
        "BatchSampler as batch_sampler",
        batch_sampler=lambda: data.BatchSampler(data.RandomSampler(Numbers()), BATCH, drop_last=False),
    ),
    of(
        "BatchSampler(drop_last) as batch_sampler",
        batch_sampler=lambda: data.BatchSampler(data.SequentialSampler(Numbers()), BATCH, drop_last=True),
    ),
    of(
        "BatchSampler as sampler, batch_size=None",
        lambda: data.TensorDataset(torch.arange(ROWS)),
        sampler=lambda: data.BatchSampler(data.RandomSampler(Numbers()), BATCH, drop_last=False),
        batch_size=None,
    ),
    of("DistributedSampler, set_epoch", sampler=lambda: data.DistributedSampler(Numbers(), 1, 0)),
    of("a list as sampler", sampler=lambda: [4, 2, 0, 19, 7, 7, 1]),
    of("own sampler", sampler=OwnSampler),
    of("endless sampler", sampler=Endless, most=5),
    of("own batch sampler, batches of several sizes", batch_sampler=Uneven),
    of("endless batch sampler", batch_sampler=EndlessBatches, most=5),
]
OPTIONS = [
    of("batch_size=1", batch_size=1),
    of("batch_size=None", batch_size=None),
    of("drop_last", drop_last=True, shuffle=True),
    of("generator", shuffle=True, generator=seeded),
    of("collate_fn", shuffle=True, collate_fn=join),
    of("pin_memory", shuffle=True, pin_memory=True),
    of("num_workers=2", shuffle=True, **WORKERS),
    of("num_workers=2, persistent_workers", shuffle=True, persistent_workers=True, **WORKERS),
    of("num_workers=2, prefetch_factor=4", shuffle=True, prefetch_factor=4, **WORKERS),
    of("num_workers=2, timeout=30", shuffle=True, timeout=30, **WORKERS),
    of("num_workers=2, worker_init_fn", shuffle=True, worker_init_fn=prepare_worker, **WORKERS),
    of("num_workers=2, multiprocessing_context=fork", shuffle=True, multiprocessing_context="fork", **WORKERS),
    of("num_workers=2, in_order=False", shuffle=True, in_order=False, **WORKERS),
    of("num_workers=2, generator, drop_last", shuffle=True, generator=seeded, drop_last=True, **WORKERS),
    of("num_workers=2, own batch sampler", batch_sampler=Uneven, **WORKERS),
    of("num_workers=2, endless sampler", sampler=Endless, most=5, **WORKERS),
]
DATASETS = [
    of("TensorDataset", lambda: data.TensorDataset(torch.arange(ROWS)), shuffle=True),
    of("StackDataset", lambda: data.StackDataset(Numbers(), Numbers(first=100)), shuffle=True),
    of("StackDataset of names", lambda: data.StackDataset(number=Numbers(), other=Numbers()), shuffle=True),
    of("ConcatDataset", lambda: data.ConcatDataset([Numbers(7), Numbers(13, 7)]), shuffle=True),
    of("Subset", lambda: data.Subset(Numbers(), [3, 1, 4, 15, 9, 2, 6]), shuffle=True),
    of("random_split", lambda: data.random_split(Numbers(), [13, 7], seeded())[0], shuffle=True),
    of("data set with __getitems__", Fetched, shuffle=True),
    of("IterableDataset", Stream),
    of("IterableDataset with a length", Measured),
    of("IterableDataset, drop_last", Stream, drop_last=True),
    of("IterableDataset, batch_size=None", Stream, batch_size=None),
    of("IterableDataset, shuffle", Stream, shuffle=True),
    of("IterableDataset, num_workers=1", Stream, num_workers=1),
    of("IterableDataset without an end", lambda: Stream(None), most=5),
    of("ChainDataset", lambda: data.ChainDataset([Stream(7), Stream(13, 7)])),
]
LOADERS: dict[str, list[Case]] = {"samplers": SAMPLERS, "options": OPTIONS, "datasets": DATASETS}


def numbers(batch: Any) -> Tensor:
    """The numbers of the samples in a batch."""
    if isinstance(batch, dict):
        return batch["number"]
    if isinstance(batch, (list, tuple)):
        return batch[0]
    return batch


def read(
    case: Case, loader: Any, accelerator: Accelerator | None, first: int = 0, save: Callable[[], None] = lambda: None
) -> list[Steps]:
    """Returns what all ranks read in each epoch from `first` on, and calls `save` in the middle of the last."""
    epochs = []
    for epoch in range(first, EPOCHS):
        steps: Steps = []
        skipped = SAVED_AT if first else 0
        if accelerator is None and isinstance(loader.sampler, data.DistributedSampler):
            loader.sampler.set_epoch(epoch)  # a prepared loader does it by itself
        most = None if case.most is None else case.most - skipped
        for batch in islice(loader, most):
            seen = numbers(batch)
            if accelerator is not None:
                seen = accelerator.gather_for_metrics(seen)
            steps.append(seen.reshape(-1).tolist())
            if epoch == EPOCHS - 1 and len(steps) == SAVED_AT:
                save()
        epochs.append(steps)
    return epochs


def plain(case: Case) -> list[Steps] | Exception:
    """Returns what a plain DataLoader gives on one process, or its error."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader = case.build()
            # Without this option batches come as workers finish them; a prepared loader keeps the order.
            if "in_order" in vars(loader):
                vars(loader)["in_order"] = True
            return read(case, loader, None)
        except Exception as error:  # as for shuffle with an IterableDataset
            return error


def same(case: Case, got: list[Steps], want: list[Steps]) -> bool:
    """Returns whether the steps are alike, or the samples in their order, where a step has more than a plain one."""
    if case.split:
        return got == want
    in_order = [[[number for step in steps for number in step] for steps in epochs] for epochs in (got, want)]
    return in_order[0] == in_order[1]


def outcome(case: Case, want: list[Steps] | Exception, folder: Path) -> str:
    """Reads a case on this rank and compares. Ranks: all; each gets its own answer."""

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, split_batches=case.split)
        torch.manual_seed(0)
        return accelerator, accelerator.prepare(case.build())

    try:
        accelerator, loader = prepared()
        got = read(case, loader, accelerator, save=lambda: accelerator.save_state(str(folder)))
        drawn = torch.get_rng_state()
        accelerator, loader = prepared()
        accelerator.load_state(str(folder))
        resumed = read(case, loader, accelerator, first=EPOCHS - 1)
    except PacelineError as error:
        return f"refused {error.code}"
    except Exception as error:  # what the sweep looks for
        if isinstance(want, Exception) and type(error) is type(want):
            return "as torch"
        return f"RAW {type(error).__name__}: {str(error)[:300]}"
    if isinstance(want, Exception):
        return "runs, and torch refuses it"
    if not same(case, got, want):
        return f"WRONG {got} for {want}"
    if accelerator.num_processes == 1:
        plain(case)
        if not torch.equal(drawn, torch.get_rng_state()):
            return "WRONG state of the random generator"
    rest = got[-1][SAVED_AT:]
    if not same(case, resumed, [rest]):
        return f"WRONG resumed: {resumed} for {rest}"
    return "exact"


def sweep(chosen: list[Case], width: int, folder: Path, timeout_s: float = 120) -> dict[str, str]:
    """Reads the cases in ONE group of processes, and returns the outcome of each; `folder` is for their checkpoints."""
    wanted = {case.name: plain(case) for case in chosen}

    def ranks() -> dict[str, str]:
        warnings.simplefilter("ignore")
        outcomes = {}
        gc.freeze()
        for number, case in enumerate(chosen):
            outcomes[case.name] = outcome(case, wanted[case.name], folder / f"{width}-{number}")
            gc.collect()
        return outcomes

    answers = run_ranks(ranks, world=width, timeout_s=timeout_s, output=[])
    result = {}
    for case in chosen:
        seen = {answer[case.name] for answer in answers}
        result[case.name] = seen.pop() if len(seen) == 1 else " | ".join(sorted(seen))
    return result
