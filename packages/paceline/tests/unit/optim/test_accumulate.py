"""The gradient of a window is the mean over its samples or items, whatever its batches look like."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline import TrainError
from paceline.optim.accumulate import Accumulation
from paceline.optim.changes import Gradients
from paceline.plan.data import BatchInfo


class Loader:
    """Batches of given sizes over all ranks, as a prepared loader would describe them."""

    may_drop = False
    seen_rows = None

    def __init__(self, batches, index=0, known=True):
        self.batches, self.index, self.known, self.at = batches, index, known, 0
        self.loader = object()

    def __iter__(self):
        for at, rows in enumerate(self.batches):
            self.at = at
            yield rows[self.index]

    @property
    def current(self):
        rows = self.batches[self.at]
        return BatchInfo(self.index, rows, rows, max(1, rows[self.index]), self.at == len(self.batches) - 1)

    @property
    def info(self):
        return self.current

    def place(self):
        return 0, self.at

    def window_rows(self, count):
        return sum(sum(rows) for rows in self.batches[self.at : self.at + count]) if self.known else None


class Active:
    """What a run knows of its loops: one loader, or none, is being iterated."""

    def __init__(self, loader=None):
        self.top = self.leading = self.loader = loader

    def ends_window(self, before=None):
        return self.loader is not None and self.loader.current.last

    def source_of(self, loss, is_whole_step=False):
        return self.loader


class Ranks:
    """Ranks that run in turn in one process; each has one gradient, and they know each other's counts beforehand."""

    def __init__(self, batches, steps, known=True, counts=()):
        self.width = len(batches[0])
        self.loaders = [Loader(batches, index, known) for index in range(self.width)]
        self.parameters = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in self.loaders]
        self.owners = []
        for loader, parameter in zip(self.loaders, self.parameters, strict=True):
            answers = iter(counts)
            fake = SimpleNamespace(sum_numbers=lambda values, answers=answers: [next(answers)])
            held = partial(self.held, parameter)
            self.owners.append(Accumulation(steps, self.width, Active(loader), fake, held))

    @staticmethod
    def held(parameter, models=None):
        return [(parameter, parameter.grad)] if parameter.grad is not None else []

    def micro_batch(self, at, weight=1.0, items=False, passes=True):
        """Adds the gradient of a mean of ones (or of their sum, with their number) on each rank."""
        for owner, loader, parameter in zip(self.owners, self.loaders, self.parameters, strict=True):
            loader.at = at
            rows = loader.current.weights[loader.index]
            with owner.window(nullcontext):
                if passes:
                    loss = parameter * (rows if items else weight)
                    owner.scale(loss, rows if items else None).backward()
                    owner.passed()

    def gradient(self):
        mean = sum(parameter.grad.item() for parameter in self.parameters) / self.width
        for parameter in self.parameters:
            parameter.grad = None
        return mean


def run(batches, steps, known=True, items=False):
    """Weight of all samples together (every loss is a mean of ones) at the end of each window, over simulated ranks."""
    totals = [sum(sum(rows) for rows in batches[a : a + steps]) for a in range(0, len(batches), steps)]
    first = [sum(batches[0])] if steps > 1 else []
    ranks = Ranks(batches, steps, known, [*first, *totals])
    windows = []
    for at in range(len(batches)):
        ranks.micro_batch(at, items=items)
        if ranks.owners[0].sync:
            windows.append(ranks.gradient())
    return windows


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_each_window_weighs_its_samples_to_one(steps, known):
    batches = [(4, 4), (4, 4), (4, 4), (4, 4), (4, 4), (2, 1)]
    assert run(batches, steps, known) == pytest.approx([1.0] * -(-6 // steps))


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_micro_batch_without_a_backward_pass_is_left_out_of_the_mean(skipped):
    ranks = Ranks([(4, 4), (4, 2), (3, 3), (4, 4)], steps=4)
    for at in range(4):
        ranks.micro_batch(at, passes=at != skipped)
    assert ranks.owners[0].sync and ranks.gradient() == pytest.approx(1.0)


def test_a_rank_without_a_sample_weighs_nothing():
    loader = Loader([(1, 0)], index=1)
    owner = Accumulation(1, 2, Active(loader), None)
    assert owner.scale(torch.tensor(5.0)).item() == 0.0
    counted = []
    fake = SimpleNamespace(sum_numbers=lambda values: counted.append(values) or [3.0])
    owner = Accumulation(1, 2, Active(loader), fake)
    assert owner.scale(torch.tensor(5.0), num_items=4).item() == 0.0
    assert counted == [[0.0]]


def test_even_batches_are_left_alone_bit_for_bit():
    loader = Loader([(4, 4)])
    loss = torch.tensor(0.1)
    assert Accumulation(1, 2, Active(loader), None).scale(loss) is loss


def test_accumulated_even_batches_divide_as_a_plain_loop_would():
    owner = Accumulation(3, 1, Active(Loader([(4,)] * 3)), None)
    with owner.window(nullcontext):
        assert owner.scale(torch.tensor(0.1)).item() == (torch.tensor(0.1) / 3).item()


@pytest.mark.parametrize("steps", [1, 2])
def test_items_are_counted_exactly(steps):
    assert run([(3, 5), (1, 7), (2, 2), (9, 1)], steps, items=True) == pytest.approx([1.0] * (4 // steps))


def test_a_number_of_items_need_not_be_whole_but_must_be_one():
    owner = Accumulation(1, 1, Active(), SimpleNamespace(sum_numbers=list))
    assert owner.scale(torch.tensor(0.9), num_items=torch.tensor(1.8)).item() == pytest.approx(0.5)
    for wrong in (-1, float("nan"), "many", torch.ones(2)):
        with pytest.raises(TrainError, match=r"\[items-count\]"):
            owner.scale(torch.tensor(1.0), num_items=wrong)


def test_backward_outside_a_window_is_an_error_where_windows_are_long():
    with pytest.raises(TrainError, match=r"\[accumulate-outside\]"):
        Accumulation(4, 1, Active(), None).scale(torch.tensor(1.0))


def test_two_means_of_one_parameter_are_an_error_where_their_sizes_show_only_later():
    parameter = nn.Parameter(torch.zeros(()))
    held = partial(Ranks.held, parameter)
    owner = Accumulation(2, 1, Active(), SimpleNamespace(sum_numbers=list), held)
    with owner.window(nullcontext):
        owner.scale(parameter * 1.0, num_items=3).backward()
        owner.passed()
        owner.scale(parameter * 1.0).backward()
        with pytest.raises(TrainError, match=r"\[items-mixed\]"):
            owner.passed()


def test_outside_of_windows_each_backward_pass_is_a_mean_of_its_own():
    parameter = nn.Parameter(torch.zeros(()))
    owner = Accumulation(1, 1, Active(), SimpleNamespace(sum_numbers=list), partial(Ranks.held, parameter))
    owner.scale(parameter * 6.0, num_items=3).backward()
    owner.passed()
    owner.scale(parameter * 5.0).backward()
    owner.passed()
    assert parameter.grad.item() == 7.0


def test_each_set_of_models_has_windows_of_its_own():
    owner = Accumulation(2, 1, Active(), None)
    ends = []
    for _ in range(3):
        for models in (frozenset({0}), frozenset({1})):
            with owner.window(nullcontext, models=models):
                owner.scale(torch.tensor(1.0))
                owner.passed()
                ends.append(owner.sync)
    assert ends == [False, False, True, True, False, False]


def test_the_end_of_a_loader_ends_the_window():
    owner = Accumulation(4, 1, Active(loader := Loader([(2,)] * 6)), None)
    ends = []
    for _ in loader:
        with owner.window(nullcontext):
            owner.scale(torch.tensor(1.0))
            owner.passed()
            ends.append(owner.sync)
    assert ends == [False, False, False, True, False, True]


@pytest.mark.parametrize("is_moved", [True, False])
@pytest.mark.parametrize("items", [True, False])
def test_a_gradient_that_is_older_than_the_window_is_not_corrected(items, is_moved):
    batches = [(4, 4), (2, 6), (3, 3), (5, 1)]
    ranks = Ranks(batches, steps=4, known=False, counts=[8, 28])
    for parameter in ranks.parameters:
        parameter.grad = torch.tensor(10.0, dtype=torch.float64)
    for at in range(4):
        ranks.micro_batch(at, items=items)
        for parameter in ranks.parameters if is_moved else ():  # as strategies do
            parameter.grad = parameter.grad.clone()
    assert ranks.gradient() == pytest.approx(11.0)


def test_a_step_between_two_losses_leaves_the_mean_of_the_second_alone():
    """Each loss has a loader of unknown length, and the second one's parameter has a gradient from before the window."""
    first, second = parameters = [nn.Parameter(torch.zeros(())) for _ in range(2)]
    loaders = [Loader([(4,), (2,)], known=False), Loader([(3,), (1,)], known=False)]
    active = Active()

    def held(models=None):
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    second.grad = torch.tensor(10.0)
    owner = Accumulation(2, 1, active, None, held)
    for at in range(2):
        with owner.window(nullcontext):
            for parameter, loader in zip(parameters, loaders, strict=True):
                loader.at = at
                active.loader = loader
                owner.scale(parameter * 1.0).backward()
                owner.passed()
                owner.settle([parameter])
    assert first.grad.item() == pytest.approx(1.0)
    assert second.grad.item() == pytest.approx(11.0)


def test_a_gradient_that_was_used_is_cleared_though_the_last_micro_batch_has_not_reached_it():
    """As that of a branch of the model, or of a layer that is frozen in the window."""
    first, second = parameters = [nn.Parameter(torch.zeros(())) for _ in range(2)]

    def held(models=None):
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    owner = Accumulation(2, 1, Active(Loader([(4,), (4,)])), None, held)
    for reached in (first, second):
        with owner.window(nullcontext):
            owner.scale(reached * 1.0).backward()
            owner.passed()
            assert owner.kept([first])
    owner.settle([first])
    assert not owner.kept([first])


def test_a_gradient_that_is_being_reduced_takes_part():
    parameter = nn.Parameter(torch.zeros(()))
    owner = Accumulation(
        2, 1, Active(Loader([(4,), (4,)])), None, lambda models=None: [], lambda changed: changed | {parameter}
    )
    with owner.window(nullcontext):
        owner.scale(parameter * 1.0)
        owner.passed()
    assert owner.kept([parameter])
    assert not owner.kept([nn.Parameter(torch.zeros(()))])


def test_a_gradient_that_was_only_reduced_does_not_take_part():
    reached, other = (nn.Parameter(torch.zeros(())) for _ in range(2))
    held = {reached: torch.zeros(()), other: torch.zeros(())}
    owner = Accumulation(
        2, 1, Active(Loader([(4,), (4,)])), None, lambda models=None: held.items(), lambda changed: changed - {other}
    )
    with owner.window(nullcontext):
        owner.scale(reached * 1.0)
        for gradient in held.values():
            gradient.add_(1.0)
        owner.passed()
    assert owner.kept([reached])
    assert not owner.kept([other])


def test_what_is_written_into_the_local_part_of_a_gradient_is_seen():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        held = [(nn.Parameter(torch.zeros(2)), distribute_tensor(torch.ones(2), mesh, [Shard(0)])) for _ in range(3)]
        before = Gradients(held)
        held[0][1].to_local().add_(1.0)  # as FSDP2 does
        held[1][1].add_(1.0)
        assert before.changed(held) == {held[0][0], held[1][0]}
    finally:
        dist.destroy_process_group()


def test_a_loader_that_takes_the_place_of_another_in_memory_is_another():
    parameter = nn.Parameter(torch.zeros(()))
    active = Active(Loader([(4,), (4,)]))
    owner = Accumulation(4, 1, active, None)
    for _ in range(3):
        with owner.window(nullcontext):
            owner.scale(parameter * 1.0)
            owner.passed()
        number_of_means = len(owner._windows.current.means)
        active.top = active.leading = active.loader = None
        active.loader = Loader([(4,), (4,)])
    assert number_of_means == 3


def test_a_gradient_of_a_checkpoint_that_is_older_than_the_window_is_cleared_at_the_head_of_the_loop():
    ranks = Ranks([(4,), (2,)], steps=2)
    ranks.micro_batch(0)
    ranks.micro_batch(1)
    resumed = Ranks([(4,), (2,)], steps=2)
    (owner,) = resumed.owners
    owner.load_window(ranks.owners[0].window_state())
    with owner.window(nullcontext):
        assert not owner.sync
        assert not owner.kept(resumed.parameters)


def test_a_window_of_a_checkpoint_keeps_its_gradients_at_the_head_of_the_loop():
    ranks = Ranks([(4,), (2,), (3,)], steps=3)
    ranks.micro_batch(0)
    state = ranks.owners[0].window_state()
    resumed = Ranks([(4,), (2,), (3,)], steps=3)
    resumed.parameters[0].grad = ranks.parameters[0].grad
    (owner,) = resumed.owners
    owner.load_window(state)
    with owner.window(nullcontext):
        assert owner.kept(resumed.parameters)
    for at in (1, 2):
        resumed.micro_batch(at)
    assert resumed.gradient() == pytest.approx(1.0)
