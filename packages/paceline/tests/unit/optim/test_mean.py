"""`Mean`: what was counted, by what losses are divided, and what a checkpoint takes up again."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.base.errors import TrainError
from paceline.optim.mean import ITEMS, MICRO_BATCHES, SAMPLES, Mean, checked_count, power_of_two


def parameter() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


@pytest.mark.parametrize(
    ("number", "power"), [(-3, 2), (0, 2), (1, 2), (1.4, 2), (2, 4), (3, 4), (4, 8), (7, 8), (8, 16), (1000, 1024)]
)
def test_a_power_of_two_near_a_number(number: float, power: float) -> None:
    assert power_of_two(number) == power
    # It divides without rounding: only the exponent of a number changes.
    assert math.frexp(0.1 / power)[0] == math.frexp(0.1)[0]


def test_the_divisor_is_the_total_of_one_rank() -> None:
    mean = Mean(SAMPLES, None)
    mean.expect(12, 4, is_exact=True)
    assert (mean.expected, mean.divisor, mean.is_exact) == (12, 3.0, True)


def test_a_micro_batch_counts_once_where_that_is_asked_for() -> None:
    mean = Mean(MICRO_BATCHES, None)
    assert mean.count(2, 1) and mean.count(3, 1)
    assert not mean.count(3, 1, once=True) and mean.count(4, 2, once=True)
    assert (mean.counted, mean.micro_batch) == (9, 2)


def test_what_was_cleared_is_forgotten_once_nothing_is_left() -> None:
    first, second = parameter(), parameter()
    mean = Mean(ITEMS, 0)
    mean.take_part({first, second})
    mean.count(5, 3)
    mean.forget({first})
    assert mean.parameters == {second} and (mean.counted, mean.micro_batch) == (5, 3)
    mean.forget({second})
    assert (mean.parameters, mean.counted, mean.micro_batch) == (set(), 0.0, 0)


def test_without_gradients_there_is_nothing_to_forget() -> None:
    # A backward pass is counted before it gives gradients.
    mean = Mean(ITEMS, 0)
    mean.count(5, 1)
    mean.forget({parameter()})
    assert (mean.counted, mean.micro_batch) == (5, 1)


def test_the_mean_of_a_checkpoint_is_that_of_the_next_loader() -> None:
    mean, first, second = Mean(SAMPLES, None), object(), object()
    assert mean.belongs_to(first) and mean.belongs_to(first) and not mean.belongs_to(second)
    assert not Mean(ITEMS, None).belongs_to(0) and Mean(ITEMS, 1000).belongs_to(int("1000"))


@pytest.mark.parametrize(("kind", "divisor"), [(SAMPLES, 2.0), (ITEMS, 8.0), (MICRO_BATCHES, 8.0)])
def test_a_mean_is_taken_up_at_another_width(kind: str, divisor: float) -> None:
    waiting = parameter()
    mean = Mean(kind, 1, counted=3.0, micro_batch=2)
    mean.expect(8, 2, is_exact=True)
    again = Mean.of_state(mean.state(), 4, {waiting})
    assert (again.kind, again.expected, again.counted, again.divisor) == (kind, 8, 3.0, divisor)
    assert again.is_exact and again.parameters == {waiting} and not again.is_local
    assert again.source == (1 if kind == ITEMS else None)


def test_what_only_one_rank_knows_is_not_saved() -> None:
    mean = Mean(ITEMS, 0, counted=3.0, is_local=True)
    assert mean.state()["counted"] is None
    assert Mean.of_state(mean.state(), 2, set()).counted == 0.0


@pytest.mark.parametrize("number", [0, 0.5, 3, torch.tensor(4.0)])
def test_a_number_of_items(number: object) -> None:
    assert checked_count(number) == float(number)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, -1e-9, math.nan, math.inf, None, "three", torch.ones(2)])
def test_what_is_no_number_of_items(number: object) -> None:
    with pytest.raises(TrainError, match="items-count"):
        checked_count(number)
