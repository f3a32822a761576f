"""Loops that use other batches than the newest one of a loop that runs: each loss counts as the samples of its own batch."""

import copy
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from paceline import Accelerator
from paceline.base.log import forget_warnings
from paceline.testing import run_ranks

Batches = Iterable[Any]
GLOBAL_BATCH = 6
STEPS = 2


def one_ahead(loader: Batches) -> Iterator[Any]:
    batches = iter(loader)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def in_chunks(loader: Batches) -> Iterator[Any]:
    batches = iter(loader)
    while chunk := list(itertools.islice(batches, 3)):
        yield from chunk


def by_thread(loader: Batches) -> Iterator[Any]:
    read: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            read.put(batch)
        read.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    yield from iter(read.get, None)
    thread.join()


def copied_ahead(loader: Batches) -> Iterator[Any]:
    return one_ahead(tuple(tensor.clone() for tensor in batch) for batch in loader)


WAYS: dict[str, Callable[[Batches], Iterable[Any]]] = {
    "one ahead": one_ahead,
    "in chunks": in_chunks,
    "by a thread": by_thread,
    "list": list,
}


def parts(samples: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    data = TensorDataset(torch.randn(samples, 3, dtype=torch.float64), torch.randn(samples, 1, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), 0.1), data


def expected(samples: int, steps: int, epochs: int = 2) -> torch.Tensor:
    """Plain PyTorch: the mean over the samples of each window."""
    model, optimizer, data = parts(samples)
    for _ in range(epochs):
        for x, y in DataLoader(data, GLOBAL_BATCH * steps):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def trained(
    way: Callable[[Batches], Iterable[Any]], samples: int, steps: int, folder: Path | None = None, stop: int = 0
) -> torch.Tensor | None:
    model, optimizer, data = parts(samples)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, project_dir=folder)
    loader = DataLoader(data, GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    progress = accelerator.resume() if folder else None
    for _ in range(progress.epoch if progress else 0, 2):
        for x, y in way(loader):
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if stop and done == stop:
                accelerator.save_state()
                return None
    return flat(model)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_counts_as_the_samples_of_its_own_batch(world: int) -> None:
    """The last global batch has one sample: ranks that used another one's counts would be idle, or weigh filler."""

    def all_ways() -> dict[tuple[str, int], torch.Tensor | None]:
        cases = itertools.product(WAYS, (1, STEPS))
        return {(name, steps): trained(WAYS[name], 19, steps) for name, steps in cases}

    for of_rank in run_ranks(all_ways, world):
        for (name, steps), weights in of_rank.items():
            torch.testing.assert_close(weights, expected(19, steps), rtol=0, atol=1e-12, msg=f"{name}, {steps}")


def cycled(full: Batches, short: Batches) -> Iterator[Any]:
    yield from itertools.islice(itertools.cycle(full), 9)


def fresh(full: Batches, short: Batches) -> Iterator[Any]:
    for _ in range(4):
        yield next(iter(short))


def one_batch(full: Batches, short: Batches) -> Iterator[Any]:
    yield from itertools.repeat(next(iter(short)), 4)


def remembered(full: Batches, short: Batches) -> Iterator[Any]:
    seen = []
    for batch in full:
        seen.append(batch)
        yield batch
    yield from seen


def beside_another(full: Batches, short: Batches) -> Iterator[Any]:
    kept = next(iter(short))
    for batch in full:
        yield batch
        yield kept


def beside_the_one_before(full: Batches, short: Batches) -> Iterator[Any]:
    before = None
    for batch in full:
        yield batch
        if before is not None:
            yield before
        before = batch


def replayed(full: Batches, short: Batches) -> Iterator[Any]:
    seen = []
    for batch in itertools.chain(full, full):
        yield batch
        seen.append(batch)
        yield seen[len(seen) // 2]


def counted(full: Batches, short: Batches) -> Iterator[Any]:
    for is_counted in (True, False):
        for batch in full:
            if not is_counted:
                yield batch


KEPT = (cycled, fresh, one_batch, remembered, beside_another, beside_the_one_before, replayed)


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_loops_that_are_over(world: int) -> None:
    """One sample is left for the last batch of the one loader, and the other one's only batch is short of one."""

    def weights_of_all() -> list[torch.Tensor]:
        found = []
        for way in KEPT:
            model, optimizer, data = parts(24)
            accelerator = Accelerator(cpu=True, split_batches=True)
            batches = way(*(accelerator.prepare(DataLoader(Subset(data, range(n)), GLOBAL_BATCH)) for n in (19, 5)))
            first = next(batches)  # a script may take a batch before it prepares its model
            model, optimizer = accelerator.prepare(model, optimizer)
            for x, y in itertools.chain([first], batches):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append(flat(model))
        return found

    expected_of_all = []
    for way in KEPT:
        model, optimizer, data = parts(24)
        for x, y in way(*(DataLoader(Subset(data, range(count)), GLOBAL_BATCH) for count in (19, 5))):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        expected_of_all.append(flat(model))
    for of_rank in run_ranks(weights_of_all, world):
        for way, weights, right in zip(KEPT, of_rank, expected_of_all, strict=True):
            torch.testing.assert_close(weights, right, rtol=0, atol=1e-12, msg=way.__name__)


def test_a_loop_over_another_loader_ends_windows_by_its_own_batches() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, optimizer, data = parts(24)
    other = nn.Linear(3, 1).double()
    model, other, optimizer = accelerator.prepare(model, other, optimizer)
    first, second = accelerator.prepare(DataLoader(data, GLOBAL_BATCH), DataLoader(data, GLOBAL_BATCH))
    ends = []
    for trained_model, batches in ((model, one_ahead(first)), (other, second)):
        for x, y in batches:
            with accelerator.accumulate(trained_model):
                accelerator.backward((trained_model(x) - y).square().mean())
                ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 4


@pytest.mark.parametrize(("batches", "steps"), [(4, 2), (5, 2), (5, 3)])
@pytest.mark.parametrize("has_two_models", [False, True])
def test_windows_that_pass_over_batches_again_end_with_the_same_ones(
    batches: int, steps: int, has_two_models: bool
) -> None:
    """As SAM does, or a GAN whose generator learns from the batches of the discriminator."""
    model, optimizer, data = parts(GLOBAL_BATCH * batches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, again, optimizer, loader = accelerator.prepare(
        model, copy.deepcopy(model), optimizer, DataLoader(data, GLOBAL_BATCH)
    )
    ends: list[list[bool]] = [[], [], []]
    for _ in range(2):
        kept = []
        for x, y in loader:
            kept.append(x)
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
            ends[0].append(accelerator.sync_gradients)
            if not accelerator.sync_gradients:
                continue
            for turn, x in itertools.product((1, 2), kept):
                of_turn = again if has_two_models else model
                with accelerator.accumulate(of_turn):
                    accelerator.backward(of_turn(x).square().mean())
                ends[turn].append(accelerator.sync_gradients)
            kept = []
    assert sum(ends[0]) == 2 * -(-batches // steps)
    assert ends[0] == ends[1] == ends[2]


def test_copies_and_files_of_a_model_do_nothing_of_ours(tmp_path: Path) -> None:
    """Between loops, and after several loops, hooks look for the batches that a model gets."""
    model, _, data = parts(12)
    accelerator = Accelerator(cpu=True)
    model, loader, other = accelerator.prepare(model, DataLoader(data, GLOBAL_BATCH), DataLoader(data, GLOBAL_BATCH))
    for nested in ((), other):
        for x, _ in loader:
            accelerator.backward(model(x).square().mean())
            for y, _ in nested:
                model(y)
        torch.save(model, tmp_path / "model.pt")
        assert b"paceline" not in (tmp_path / "model.pt").read_bytes()
        for same in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
            assert torch.equal(same(x), model(x))


class OfSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(rows, self.weight)


def test_sparse_batches_may_be_kept() -> None:
    """They have no storage by which they could be known."""
    rows = torch.eye(3).double().to_sparse()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OfSparse())
    loader = accelerator.prepare(DataLoader(range(4), 2, collate_fn=lambda _: rows))
    for batch in itertools.islice(itertools.cycle(loader), 4):
        accelerator.backward(model(batch).square().mean())


def by_method(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[2](torch.tanh(model[0](x)))  # type: ignore[operator, index]


def by_copy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.clone())  # type: ignore[no-any-return]


def test_batches_that_nobody_sees_are_told() -> None:
    """A copy that was taken ahead, a copy of a batch that was kept, and one that the model itself does not get.

    After a loop that only counts, one over the same loader has one batch at a time: nothing is told of copies there.
    """

    def warnings() -> list[list[str]]:
        messages: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        trained(copied_ahead, 19, 1)
        found = [messages.copy()]
        of_kept = ((by_method, cycled), (by_copy, cycled), (by_copy, fresh), (by_copy, replayed), (by_method, replayed))
        for output_of, way in (*of_kept, (by_copy, counted)):
            forget_warnings()
            messages.clear()
            model, optimizer, data = parts(24)
            accelerator = Accelerator(cpu=True, split_batches=True)
            loaders = accelerator.prepare(*(DataLoader(Subset(data, range(n)), GLOBAL_BATCH) for n in (19, 5)))
            model, optimizer = accelerator.prepare(model, optimizer)
            for x, y in way(*loaders):
                accelerator.backward((output_of(model, x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append(messages.copy())
        return found

    *of_unseen, of_counted = run_ranks(warnings, 2)[0]
    for messages in of_unseen:
        (message,) = messages
        assert "nobody saw from which" in message
    assert of_counted == []


def test_a_resumed_run_gets_the_batches_that_were_taken_but_not_used(tmp_path: Path) -> None:
    """Four batches of an epoch are one ahead; the save comes when the last one has been taken, and waits."""
    for stop in (2, 4):
        folder = tmp_path / str(stop)
        run_ranks(trained, 2, args=(one_ahead, 34, STEPS, folder, stop))
        for world in (1, 2):
            weights = run_ranks(trained, world, args=(one_ahead, 34, STEPS, folder))[0]
            torch.testing.assert_close(weights, expected(34, STEPS), rtol=0, atol=1e-12)


def test_metrics_count_the_samples_of_the_batch_that_the_model_has_seen() -> None:
    def evaluated() -> list[float]:
        model, _, data = parts(20)
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(model.eval(), DataLoader(data, 3, drop_last=False))
        with torch.no_grad():
            seen = [accelerator.gather_for_metrics((model(x), y))[1] for x, y in one_ahead(loader)]
        return torch.cat(seen).flatten().tolist()

    for values in run_ranks(evaluated, 3):
        assert values == parts(20)[2].tensors[1].flatten().tolist()


def test_outputs_without_labels_count_as_those_of_the_batch_that_the_model_has_seen() -> None:
    """Each pass but the last comes after the next batch was read, of which the last one is short."""

    def evaluated() -> torch.Tensor:
        model, _, data = parts(20)
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(model.eval(), DataLoader(data, 3, drop_last=False))
        with torch.no_grad():
            return torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in one_ahead(loader)])

    model, _, data = parts(20)
    with torch.no_grad():
        expected_outputs = model.eval()(data.tensors[0])
    for outputs in run_ranks(evaluated, 3):
        torch.testing.assert_close(outputs, expected_outputs)


def test_metrics_of_a_batch_whose_loop_is_over() -> None:
    """The only batch has a row less than the ranks together; the loop that runs has whole batches."""

    def evaluated() -> list[float]:
        model, _, data = parts(24)
        accelerator = Accelerator(cpu=True, split_batches=True)
        full, short = DataLoader(data, GLOBAL_BATCH), DataLoader(Subset(data, range(5)), GLOBAL_BATCH)
        model, full, short = accelerator.prepare(model.eval(), full, short)
        seen = []
        for _ in full:
            x, y = next(iter(short))
            with torch.no_grad():
                seen.append(accelerator.gather_for_metrics((model(x), y))[1])
        return torch.cat(seen).flatten().tolist()

    for values in run_ranks(evaluated, 3):
        assert values == 4 * parts(24)[2].tensors[1][:5].flatten().tolist()


def test_metrics_that_are_gathered_later_are_known_by_their_labels() -> None:
    """One step late, which spares a wait for the device; or of a list of batches, of which the model gets copies."""

    def evaluated() -> list[list[float]]:
        model, _, data = parts(13)
        accelerator = Accelerator(cpu=True, split_batches=True)
        model, loader = accelerator.prepare(model.eval(), DataLoader(data, GLOBAL_BATCH))
        late: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        before = None
        with torch.no_grad():
            for x, y in loader:
                if before is not None:
                    late.append(accelerator.gather_for_metrics(before)[1])
                before = model(x), y
            late.append(accelerator.gather_for_metrics(before)[1])
            for x, y in list(loader):
                kept.append(accelerator.gather_for_metrics((model(x.clone()), y))[1])
        return [torch.cat(values).flatten().tolist() for values in (late, kept)]

    for values in run_ranks(evaluated, 3):
        assert values == 2 * [parts(13)[2].tensors[1].flatten().tolist()]


def test_rows_that_are_gathered_for_a_loss_are_those_of_the_batch_that_the_model_has_seen() -> None:
    def rows() -> list[int]:
        model, _, data = parts(19)
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(model, DataLoader(data, GLOBAL_BATCH // accelerator.num_processes))
        numbers = []
        for x, _ in one_ahead(loader):
            whole = accelerator.gather(model(x), with_gradient=True)
            accelerator.backward(whole.square().mean())
            numbers.append(len(whole))
        return numbers

    assert run_ranks(rows, 2) == [[6, 6, 6, 1]] * 2


class Rows(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[number] for number in range(len(self.data)))


def test_values_of_a_batch_beside_a_loop_whose_batch_leaves_ranks_idle() -> None:
    """No prepared model has computed them, so that their number of rows alone shows from which batch they are."""

    def gathered() -> list[float]:
        _, _, data = parts(GLOBAL_BATCH)
        accelerator = Accelerator(cpu=True, split_batches=True)
        short = DataLoader(Rows(parts(5)[2]), 4 * GLOBAL_BATCH)
        short, other = accelerator.prepare(short, DataLoader(data, GLOBAL_BATCH))
        values = []
        for _ in short:
            _, y = next(iter(other))
            values += accelerator.gather_for_metrics(2 * y).flatten().tolist()
        return values

    expected_rows = (2 * parts(GLOBAL_BATCH)[2].tensors[1]).flatten().tolist()
    assert run_ranks(gathered, 3) == [expected_rows] * 3


def test_values_of_a_batch_that_was_taken_ahead_are_gathered_after_an_evaluation() -> None:
    """The last batch leaves a rank idle, and its loop is over by then; the evaluation has whole batches."""

    def gathered() -> list[float]:
        model, _, data = parts(20)
        accelerator = Accelerator(cpu=True, split_batches=True)
        loader, others = DataLoader(data, GLOBAL_BATCH), DataLoader(Subset(data, range(12)), 2 * GLOBAL_BATCH)
        model, loader, others = accelerator.prepare(model, loader, others)
        rows = []
        for x, y in one_ahead(loader):
            losses = (model(x) - y).square()
            accelerator.backward(losses.mean())
            with torch.no_grad():
                for z, _ in others:
                    accelerator.gather_for_metrics(model(z))
            rows.append(accelerator.gather_for_metrics(losses.detach()))
        return torch.cat(rows).flatten().tolist()

    model, _, data = parts(20)
    expected_losses = (model(data.tensors[0]) - data.tensors[1]).square().flatten().tolist()
    for values in run_ranks(gathered, 3):
        assert values == pytest.approx(expected_losses)
