"""The time of a step from its work and a calibration: every term, by exact numbers."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline.plan.plan import Plan
from paceline.plan.resolve import draft
from paceline.planner.calibration import Calibration, Link, Machine
from paceline.planner.step_time import bubble_of, overlaps, step_time
from paceline.planner.work import Computation, Message, Work

CALIBRATION = Calibration(
    Machine("host1", "cpu", "2.13.0", 2, 1),
    measured=0.0,
    matrix={"float32": ((1.0, 100.0),), "bfloat16": ((1.0, 200.0),)},
    memory=((1.0, 10.0),),
    optimizer=20.0,
    overhead_s=0.01,
    links={"allreduce": Link(0.5, 50.0)},
    overlap=0.5,
)


def work(*computations: tuple[Computation, int], messages: tuple[tuple[Message, int], ...] = ()) -> Work:
    return Work(Counter(dict(computations)), Counter(dict(messages)))


def test_an_operation_takes_what_it_needs_longest_for():
    time = step_time(
        work(
            (Computation("forward", "float32", 1000, 10), 2),  # 10 s of arithmetic, 1 s of memory
            (Computation("backward", "bfloat16", 1000, 80), 1),  # 5 s and 8 s
            (Computation("forward", "float32", 0, 30), 1),  # 3 s of memory
            (Computation("optimizer", "float32", 0, 100), 1),  # 5 s at the optimizer's rate
        ),
        CALIBRATION,
    )
    assert time.compute_s == 2 * 10 + 8 + 3
    assert time.optimizer_s == 5
    assert time.overhead_s == pytest.approx(5 * 0.01)
    assert (time.communication_s, time.bubble_s, time.hidden_s) == (0, 0, 0)
    assert time.total_s == pytest.approx(31 + 5 + 0.05)


def test_the_backward_pass_hides_a_part_of_its_messages():
    backward = (Computation("backward", "float32", 300, 0), 1)  # 3 s
    gradients = (Message("backward", "allreduce", 2, False, 100), 2)  # 1 s of latency, 4 s of bytes
    buffers = (Message("forward", "allreduce", 2, False, 50), 1)  # 1.5 s
    done = work(backward, messages=(gradients, buffers))
    waiting = step_time(done, CALIBRATION)
    assert (waiting.communication_s, waiting.hidden_s) == (6.5, 0)
    late = replace(CALIBRATION, wait_s=0.25)
    assert step_time(done, late).communication_s == 6.5 + 3 * 0.25
    assert step_time(done, late, overlaps=True).communication_s == 5.0 + 0.25
    beside = step_time(done, CALIBRATION, overlaps=True)
    # Half of the 3 s that computing lasts.
    assert (beside.communication_s, beside.hidden_s) == (5.0, 1.5)


def test_a_message_whose_cost_nobody_measured_is_named():
    time = step_time(work(messages=((Message("forward", "alltoall", 2, False, 50), 1),)), CALIBRATION)
    assert time.communication_s == 0 and time.unknown == ("alltoall",)


def test_a_bubble_is_a_share_of_the_whole():
    time = step_time(work((Computation("forward", "float32", 399, 0), 1)), CALIBRATION, bubble=0.2)
    assert time.bubble_s == pytest.approx((3.99 + 0.01) / 4)
    texts = {name: source for name, _, source in time.terms(CALIBRATION)}
    assert list(texts) == ["compute", "communication", "optimizer", "bubble", "overhead"]
    assert texts["overhead"] == "10000.0 us for each operation"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"replicate": 2}, True),
        ({"shard": 2, "zero": 1}, True),
        ({"shard": 2, "zero": 2}, True),
        ({"shard": 2, "zero": 3}, False),
        ({"tp": 2}, False),
        ({"pp": 2}, False),
        ({"cp": 2}, False),
    ],
)
def test_which_plans_send_gradients_beside_the_backward_pass(settings, expected):
    assert overlaps(draft(settings, [], 2)) is expected


def test_the_bubble_is_the_schedules():
    assert bubble_of(Plan()) == 0
    # 1F1B, 4 micro-batches for each of 2 ranks: (p - 1) / (m + p - 1).
    assert bubble_of(draft({"pp": 2}, [], 2)) == pytest.approx(1 / 9)
    options = {"pipeline": {"schedule": "gpipe", "microbatches": 2}}
    assert bubble_of(draft({"pp": 2}, [], 2, options)) == pytest.approx(1 / 3)
