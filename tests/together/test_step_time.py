"""The time of a step from its work and a calibration: every term, by exact numbers."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.settings import RunSettings
from paceline.parallel.strategy import timetable_of
from paceline.plan.facts import Layer, ModelFacts
from paceline.plan.plan import Plan
from paceline.plan.resolve import draft
from paceline_large.pipeline.schedules import order
from paceline_large.pipeline.timetable import PipelineTimetable
from paceline_lens.forecast.calibration import Calibration, Link, Machine
from paceline_lens.forecast.datasheet import FAST, calibration_of
from paceline_lens.forecast.device import device_of
from paceline_lens.forecast.report import term_lines
from paceline_lens.forecast.step_time import Beside, StepTime, beside_computing, step_time
from paceline_lens.forecast.work import Computation, Message, Work

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
    assert step_time(done, late, beside=Beside(("backward",))).communication_s == 5.0 + 0.25
    beside = step_time(done, CALIBRATION, beside=Beside(("backward",)))
    # Half of the 3 s that computing lasts.
    assert (beside.communication_s, beside.hidden_s) == (5.0, 1.5)


def test_a_message_whose_cost_nobody_measured_is_named():
    time = step_time(work(messages=((Message("forward", "alltoall", 2, False, 50), 1),)), CALIBRATION)
    assert time.communication_s == 0 and time.unknown == ("alltoall",)


FORWARD = (Computation("forward", "float32", 199, 0), 4)  # of rank 0: 4 x (1.99 + 0.01) s
BACKWARD = (Computation("backward", "float32", 399, 0), 4)  # 4 x (3.99 + 0.01) s
TWO_STAGES = order("1f1b", ranks=2, stages_per_rank=1, microbatches=4)


@pytest.mark.parametrize(
    ("shares", "alone", "length"),
    [
        # 4 micro-batches of 6 s, and one more of them: (p - 1) / (m + p - 1) of the time.
        ((1.0, 1.0), 1.0, 30.0),
        # Rank 0 waits for the first backward pass of the other stage (3 s) less the forward pass that it does meanwhile (2 s),
        # and for its last passes (3 s) less a backward pass (4 s), so not at all.
        ((1.0, 0.5), 1.0, 25.0),
        # The other stage never waits once it has begun: 2 s, 4 x 9 s, and the last backward pass of rank 0.
        ((1.0, 1.5), 1.0, 42.0),
        # Of 30 s, one of them computes alone for 12, which then takes half of that.
        ((1.0, 1.0), 2.0, 24.0),
    ],
)
def test_the_ranks_of_a_pipeline_wait_as_its_schedule_says(shares, alone, length):
    timetable = PipelineTimetable(TWO_STAGES, shares)
    time = step_time(work(FORWARD, BACKWARD), replace(CALIBRATION, alone=alone), timetable=timetable)
    assert time.total_s == pytest.approx(length)
    assert time.bubble_s == pytest.approx(length - 24)
    texts = {name: source for name, _, source in time.terms(CALIBRATION)}
    assert list(texts) == ["compute", "communication", "optimizer", "bubble", "overhead"]
    assert texts["overhead"] == "10000.0 us for each operation"


def test_a_stage_waits_by_its_schedule_and_not_for_its_messages():
    links = {"send": Link(0.5, 50.0)}
    late = replace(CALIBRATION, wait_s=0.25, links=links)
    done = work(FORWARD, BACKWARD, messages=((Message("forward", "send", 2, False, 50), 4),))
    timetable = PipelineTimetable(TWO_STAGES, (1.0, 1.0))
    assert step_time(done, late).communication_s == 4 * 1.5 + 4 * 0.25
    assert step_time(done, late, timetable=timetable).communication_s == 4 * 1.5


def test_each_batch_of_a_step_has_its_bubble():
    of_two_batches = step_time(
        work((FORWARD[0], 8), (BACKWARD[0], 8)),
        CALIBRATION,
        timetable=PipelineTimetable(TWO_STAGES, (1.0, 1.0)),
        batches=2,
    )
    assert of_two_batches.total_s == pytest.approx(60)


def test_the_documentation_shows_the_terms_as_they_are_printed():
    rates = {"allreduce": 1.18e9, "allgather": 0.88e9, "reducescatter": 0.5e9, "broadcast": 2.22e9, "alltoall": 1.16e9}
    links = {name: Link(0.0, rate) for name, rate in (rates | {"send": 0.81e9}).items()}
    calibration = Calibration(
        CALIBRATION.machine, 0.0, {"float32": ((1.0, 42e9),)}, ((1.0, 25.1e9),), 17.5e9, 18e-6, links, noise=0.6
    )
    time = StepTime(0.0114, 0.0857, 0.0039, 0.0, 0.0229, hidden_s=0.0034)
    sample = [f"  forecast for this machine: {1e3 * time.total_s:.1f} ms a step, by ", *term_lines(time, calibration)]
    page = Path(__file__).parents[2] / "docs" / "how-to" / "plan-before-you-run.md"
    text = page.read_text(encoding="utf-8")
    assert all(f"{line}\n" in text for line in sample[1:]) and sample[0] in text


@pytest.mark.parametrize(
    ("settings", "over_gloo", "on_accelerators"),
    [
        ({"replicate": 4}, ("backward",), ("backward",)),
        ({"shard": 4, "zero": 1}, ("backward",), ("backward",)),
        ({"shard": 4, "zero": 2}, ("backward",), ("backward",)),
        ({"shard": 4, "zero": 3}, (), ("forward", "backward")),
        ({"shard": 2, "tp": 2}, (), ("forward", "backward")),
        ({"tp": 4}, (), ()),
        ({"cp": 4}, (), ("backward",)),
    ],
)
def test_which_messages_travel_while_the_model_computes(settings, over_gloo, on_accelerators):
    plan = draft(RunSettings.of(settings), [], 4)
    message = Message("backward", "allreduce", 4, False, 1)
    for calibration, phases in (
        (CALIBRATION, over_gloo),
        (calibration_of(device_of("h100"), FAST, plan), on_accelerators),
    ):
        beside = beside_computing(plan, calibration)
        seen = [phase for phase in ("forward", "backward") if beside and beside.covers(replace(message, phase=phase))]
        assert tuple(seen) == phases


def gpt(blocks, width=8, vocabulary=64):
    """Facts about a model of an embedding, blocks of one linear layer each, and a head."""
    layers = [Layer("tokens", "Embedding", "embedding", (("weight", (vocabulary, width)),))]
    for number in range(blocks):
        layers.append(Layer(f"blocks.{number}", "Linear", "linear", (("weight", (width, width)),)))
    layers.append(Layer("head", "Linear", "linear", (("weight", (vocabulary, width)),)))
    names = tuple(f"blocks.{number}" for number in range(blocks))
    return ModelFacts("GPT", 1, 1, 4, blocks=names, layers=tuple(layers))


def test_the_schedule_and_its_stages_are_the_plans():
    assert timetable_of(Plan(), [gpt(4)]) is None
    plan = draft(RunSettings.of({"pp": 2}), [], 2)
    # 2 blocks of 64 elements; 1 block and a head of 512. The tokens are looked up, not multiplied.
    timetable = timetable_of(plan, [ModelFacts("small", 0, 0, 0), gpt(3)])
    assert timetable.order == order("1f1b", 2, 1, 8)
    assert timetable.shares == [1.0, (64 + 512) / 128]
    options = {"pipeline": {"schedule": "interleaved", "microbatches": 4}}
    timetable = timetable_of(draft(RunSettings.of({"pp": 2, "options": options}), [], 2), [gpt(6)])
    assert timetable.order == order("interleaved", 2, 2, 4)
    # Rank 0 has stages 0 and 2: 2 blocks and 1 of 6.
    assert timetable.shares == pytest.approx([128 / 96, 128 / 96, 64 / 96, (64 + 512) / 96])
    times = {"pipeline": {"split": "time", "weights": [1, 2, 3]}}
    assert timetable_of(draft(RunSettings.of({"pp": 2, "options": times}), [], 2), [gpt(3)]).shares == [1.0, 1.0]


def test_blocks_with_convolutions_count_the_same():
    facts = gpt(4)
    convolution = Layer("blocks.0", "Conv2d", "", (("weight", (8, 8, 3, 3)),))
    facts = replace(facts, layers=(facts.layers[0], convolution, *facts.layers[2:]))
    assert timetable_of(draft(RunSettings.of({"pp": 2}), [], 2), [facts]).shares == [1.0, 1.0]
