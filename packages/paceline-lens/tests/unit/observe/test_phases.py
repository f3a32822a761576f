"""Phases and the wall clock on them, with a clock that the test moves."""

import pytest
import torch
from torch import nn

from paceline.data.active import ActiveLoaders
from paceline.world.events import Events
from paceline_lens.observe.clock import HostClock
from paceline_lens.observe.phases import NAMES, Phases
from paceline_lens.observe.wall_clock import WallClock


class Hand(HostClock):
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clocked():
    hand, phases, told = Hand(), Phases(), []
    wall = WallClock(hand, 1, told.append)
    phases.listeners.append(wall)
    return hand, phases, wall, told


def spend(hand, phases, name, ms):
    with phases.during(name):
        hand.time += ms / 1e3


def step(hand, phases, micro=1, scale=1):
    for _ in range(micro):
        spend(hand, phases, "data", 1 * scale)
        spend(hand, phases, "forward", 2 * scale)
        hand.time += 3e-3 * scale  # the loss
        with phases.during("backward"):
            hand.time += 4e-3 * scale
            phases.reduce()
            hand.time += 5e-3 * scale
        spend(hand, phases, "reduce", 1 * scale)
    spend(hand, phases, "clip", 6 * scale)
    spend(hand, phases, "step", 7 * scale)
    hand.time += 8e-3 * scale


def test_phases_of_a_step_sum_to_the_step(clocked):
    hand, phases, wall, told = clocked
    step(hand, phases, micro=2)
    step(hand, phases, micro=2, scale=10)
    phases.enter("data")
    first, second = wall.recent
    assert first.phases == pytest.approx(
        {"data": 2, "forward": 4, "backward": 8, "reduce": 12, "rest": 14, "clip": 6, "step": 7}
    )
    assert first.total_ms == pytest.approx(sum(first.phases.values())) == pytest.approx(53)
    assert second.total_ms == pytest.approx(530)
    assert len(first.micro_batches) == 2
    assert first.micro_batches[1] == pytest.approx({"data": 1, "forward": 2, "rest": 3, "backward": 4, "reduce": 6})
    assert wall.mean()["total"] == pytest.approx(530)  # the first step counts only while there is no other
    assert told == [
        "step 1: 53.00 ms = data 2.00, forward 4.00, backward 8.00, reduce 12.00, clip 6.00, step 7.00, rest 14.00",
        "step 2: 530.00 ms = data 20.00, forward 40.00, backward 80.00, reduce 120.00, clip 60.00, step 70.00, rest 140.00",
    ]


def test_what_a_script_does_after_its_last_step_belongs_to_none(clocked):
    hand, phases, wall, _ = clocked
    step(hand, phases)
    hand.time += 100
    wall.finish()
    phases.end()
    assert wall.last.total_ms == pytest.approx(29)
    assert "step as a whole" in wall.text()


def test_an_inner_phase_takes_its_time_from_the_outer_one(clocked):
    hand, phases, wall, _ = clocked
    with phases.during("pipeline"):
        hand.time += 1e-3
        spend(hand, phases, "forward", 2)
        hand.time += 3e-3
        spend(hand, phases, "backward", 4)
    spend(hand, phases, "step", 5)
    assert wall.now().phases == pytest.approx({"pipeline": 4, "forward": 2, "backward": 4, "step": 5, "rest": 0})
    spend(hand, phases, "data", 1)
    assert len(wall.last.micro_batches) == 1


def test_several_optimizers_step_in_one_step_and_an_error_leaves_its_phase(clocked):
    hand, phases, wall, _ = clocked
    with pytest.raises(ValueError), phases.during("forward"):
        raise ValueError
    assert phases.now == "rest"
    spend(hand, phases, "step", 1)
    spend(hand, phases, "step", 1)
    assert phases.steps == 0
    spend(hand, phases, "forward", 1)
    assert phases.steps == 1 and wall.last.phases["step"] == pytest.approx(2)


def test_calls_of_a_model_are_forward_and_the_end_of_a_backward_pass_is_reduce():
    phases, model = Phases(), nn.Linear(2, 2)
    seen = []

    class Ear:
        def to(self, phase):
            seen.append(phase)

        def micro_batch(self):
            seen.append("micro")

        stepped = ended = micro_batch

    phases.listeners.append(Ear())
    phases.follow_model(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert seen == []
    loss = model(torch.ones(1, 2)).sum()
    with phases.during("backward"):
        loss.backward()
        phases.reduce()
    phases.reduce()  # of a backward pass that nobody follows
    assert seen == ["forward", "rest", "backward", "reduce", "rest"]
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert phases.now == "rest"
    assert set(seen) - {"micro"} <= set(NAMES)


def test_waiting_for_a_batch_is_data_and_the_source_is_closed():
    phases, closed, events = Phases(), [], Events()
    events.phase.subscribe({"data": phases.during("data")})
    loaders = ActiveLoaders(events)

    def source():
        try:
            for number in range(3):
                assert phases.now == "data"
                yield number
        finally:
            closed.append(True)

    assert list(loaders.observed(source())) == [0, 1, 2]
    batches = loaders.observed(source())
    assert next(batches) == 0 and phases.now == "rest"
    batches.close()
    assert closed == [True, True]
