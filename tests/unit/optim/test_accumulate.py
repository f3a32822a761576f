"""The gradient of a window is the mean over its samples or items, whatever its batches look like."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from paceline import TrainError
from paceline.optim.accumulate import Accumulation
from paceline.plan.data import BatchInfo


class Loader:
    """Batches of given sizes over all ranks, as a prepared loader would describe them."""

    def __init__(self, batches, index=0, known=True):
        self.batches, self.index, self.known, self.at = batches, index, known, 0

    def __iter__(self):
        for at, rows in enumerate(self.batches):
            self.at = at
            yield rows[self.index]

    @property
    def current(self):
        rows = self.batches[self.at]
        return BatchInfo(self.index, rows, rows, max(1, rows[self.index]), self.at == len(self.batches) - 1)

    def window_rows(self, count):
        return sum(sum(rows) for rows in self.batches[self.at : self.at + count]) if self.known else None


def active(loader):
    """What a run knows of its loops: one loader, or none, is being iterated."""
    return SimpleNamespace(top=loader, leading=loader)


def run(batches, steps, known=True, items=False):
    """Weight of all samples together (every loss is a mean of ones) at the end of each window, over simulated ranks."""
    width = len(batches[0])
    totals = [sum(sum(rows) for rows in batches[a : a + steps]) for a in range(0, len(batches), steps)]
    loaders = [Loader(batches, index, known) for index in range(width)]
    owners = []
    for loader in loaders:
        answers = iter([sum(batches[0]), *totals])  # what the reductions would say, in order
        fake = SimpleNamespace(sum_ints=lambda values, answers=answers: [next(answers)])
        owners.append(Accumulation(steps, width, active(loader), fake))
    windows, gradient = [], 0.0
    for at, rows in enumerate(batches):
        for rank, owner in enumerate(owners):
            loaders[rank].at = at
            with owner.window(nullcontext):
                loss = torch.tensor(float(rows[rank])) if items else torch.tensor(1.0)
                gradient += float(owner.scale(loss, rows[rank] if items else None)) / width
        if owners[0].sync:
            corrections = {owner.correction() for owner in owners}
            windows.append(gradient * corrections.pop())
            assert not corrections
            gradient = 0.0
    return windows


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_each_window_weighs_its_samples_to_one(steps, known):
    batches = [(4, 4), (4, 4), (4, 4), (4, 4), (4, 4), (2, 1)]
    assert run(batches, steps, known) == pytest.approx([1.0] * -(-6 // steps))


def test_a_rank_without_a_sample_weighs_nothing():
    loader = Loader([(1, 0)], index=1)
    owner = Accumulation(1, 2, active(loader), None)
    assert owner.scale(torch.tensor(5.0)).item() == 0.0
    counted = []
    fake = SimpleNamespace(sum_ints=lambda values: counted.append(values) or [3])
    owner = Accumulation(1, 2, active(loader), fake)
    assert owner.scale(torch.tensor(5.0), num_items=4).item() == 0.0
    owner.correction()
    assert counted == [[0], [0]]


def test_even_batches_are_left_alone_bit_for_bit():
    loader = Loader([(4, 4)])
    loss = torch.tensor(0.1)
    assert Accumulation(1, 2, active(loader), None).scale(loss) is loss


def test_accumulated_even_batches_divide_as_a_plain_loop_would():
    owner = Accumulation(3, 1, active(Loader([(4,)] * 3)), None)
    with owner.window(nullcontext):
        assert owner.scale(torch.tensor(0.1)).item() == (torch.tensor(0.1) / 3).item()


@pytest.mark.parametrize("steps", [1, 2])
def test_items_are_counted_exactly(steps):
    assert run([(3, 5), (1, 7), (2, 2), (9, 1)], steps, items=True) == pytest.approx([1.0] * (4 // steps))


def test_backward_outside_a_window_is_an_error_where_windows_are_long():
    with pytest.raises(TrainError, match=r"\[accumulate-outside\]"):
        Accumulation(4, 1, active(None), None).scale(torch.tensor(1.0))


def test_two_kinds_of_losses_in_one_window_are_an_error():
    owner = Accumulation(1, 1, active(None), SimpleNamespace(sum_ints=lambda v: v))
    with owner.window(nullcontext):
        owner.scale(torch.tensor(1.0), num_items=3)
        with pytest.raises(TrainError, match=r"\[items-mixed\]"):
            owner.scale(torch.tensor(1.0))


def test_the_end_of_a_loader_ends_the_window():
    owner = Accumulation(4, 1, active(loader := Loader([(2,)] * 6)), None)
    ends = []
    for _ in loader:
        with owner.window(nullcontext):
            ends.append(owner.sync)
    assert ends == [False, False, False, True, False, True]
