"""`StepTime`: how long a step takes on a calibrated machine, as a sum of five terms. Pure.

    compute        every operation of forward and backward: max(FLOP / matrix rate, bytes / memory rate)
    communication  every message: latency + bytes / link rate, less what the backward pass hides, and more by the wait for
                   the slowest rank where it hides nothing
    optimizer      bytes that its step reads and writes / optimizer rate
    bubble         how long rank 0 of a pipeline waits for the others, from playing the schedule
    overhead       operations x seconds of an empty one

The work is that of rank 0 in a rehearsal. The other stages of a pipeline are taken to need more or less time in proportion to
the weights that they compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from paceline.plan.facts import ModelFacts
from paceline.plan.pipeline import Action, loads, simulate
from paceline.plan.plan import Plan
from paceline.planner.calibration import Calibration
from paceline.planner.work import Work


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute_s, communication_s, optimizer_s, bubble_s, overhead_s: the terms.
        bubble_s: may be below 0, where rank 0 seldom waits and computes faster while others do.
        hidden_s: of communication that the backward pass hides; it is not part of the sum.
        unknown: kinds of messages whose cost was not measured, which are left out of the sum.
    """

    compute_s: float
    communication_s: float
    optimizer_s: float
    bubble_s: float
    overhead_s: float
    hidden_s: float = 0.0
    unknown: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return self.compute_s + self.communication_s + self.optimizer_s + self.bubble_s + self.overhead_s

    def terms(self, calibration: Calibration) -> Iterator[tuple[str, float, str]]:
        """Each term with its seconds and its source, for people."""
        sizes = calibration.matrix["float32"]
        fastest = max(rate for _, rate in sizes)
        memory = max(rate for _, rate in calibration.memory)
        yield (
            "compute",
            self.compute_s,
            f"matrix products at up to {fastest / 1e9:.0f} GFLOP/s, others at up to {memory / 1e9:.1f} GB/s",
        )
        links = ", ".join(f"{name} {link.bytes_per_s / 1e9:.2f} GB/s" for name, link in calibration.links.items())
        hidden = f"; another {self.hidden_s * 1e3:.1f} ms are hidden by the backward pass" if self.hidden_s else ""
        yield "communication", self.communication_s, (links or "not measured") + hidden
        yield "optimizer", self.optimizer_s, f"its step moves {(calibration.optimizer or memory) / 1e9:.1f} GB/s"
        faster = (
            f"; a rank computes {calibration.alone:.2f} times as fast while the others wait" if self.bubble_s else ""
        )
        yield "bubble", self.bubble_s, f"waiting by the schedule of a pipeline{faster}"
        yield "overhead", self.overhead_s, f"{calibration.overhead_s * 1e6:.1f} us for each operation"


@dataclass(frozen=True)
class Pipelined:
    """The schedule of a pipeline, as far as its time goes.

    Attributes:
        order: for each rank, its actions in one batch, in order.
        shares: how long each stage takes, where the stages of rank 0 take 1 on average.
        batches: in one step.
    """

    order: Mapping[int, Sequence[Action]]
    shares: Sequence[float]
    batches: int = 1

    def seconds(self, forward_s: float, backward_s: float, alone: float) -> float:
        """Of one step, from its first forward pass to its last backward pass.

        Args:
            forward_s, backward_s: that rank 0 computes in it while all ranks do.
            alone: how many times as fast a rank computes while the others wait.
        """
        passes = sum(op == "F" for op, _, _ in self.order[0])
        forward_s /= passes * self.batches
        backward_s /= passes * self.batches
        lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
        batch = simulate(self.order, lambda op, stage: lengths[op] * self.shares[stage], alone)
        return self.batches * batch.length


def step_time(
    work: Work, calibration: Calibration, overlaps: bool = False, pipelined: Pipelined | None = None
) -> StepTime:
    """The time of a step.

    Args:
        work: of rank 0.
        calibration: of the machine, with as many ranks.
        overlaps: whether messages of the backward pass travel while it goes on; see `overlaps`.
        pipelined: the schedule, where there is a pipeline; see `pipelined_by`.
    """
    seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    operations = dict.fromkeys(seconds, 0)
    for computation, count in work.computations.items():
        operations[computation.phase] += count
        if computation.phase == "optimizer":
            seconds["optimizer"] += count * calibration.optimizer_seconds(computation.bytes)
            continue
        arithmetic = 0.0
        if computation.flops:
            arithmetic = calibration.matrix_seconds(computation.flops, computation.bytes, computation.dtype)
        moving = calibration.memory_seconds(computation.bytes)
        seconds[computation.phase] += count * max(arithmetic, moving)
    sending = 0.0
    beside_backward = 0.0
    unknown: set[str] = set()
    for message, count in work.messages.items():
        link = calibration.links.get(message.operation)
        if link is None:
            unknown.add(message.operation)
            continue
        spent = link.seconds(count * message.bytes, count)
        sending += spent
        # A stage does not wait where it sends; for what comes from others it waits by the schedule.
        is_between_stages = pipelined is not None and message.operation == "send"
        if overlaps and message.phase == "backward":
            beside_backward += spent
        elif not is_between_stages:
            sending += count * calibration.wait_s
    hidden = calibration.overlap * min(beside_backward, seconds["backward"])
    compute = seconds["forward"] + seconds["backward"]
    overhead = sum(operations.values()) * calibration.overhead_s
    waiting = 0.0
    if pipelined is not None:
        forward_s = seconds["forward"] + operations["forward"] * calibration.overhead_s
        backward_s = seconds["backward"] + operations["backward"] * calibration.overhead_s
        waiting = pipelined.seconds(forward_s, backward_s, calibration.alone) - forward_s - backward_s
    return StepTime(compute, sending - hidden, seconds["optimizer"], waiting, overhead, hidden, tuple(sorted(unknown)))


def overlaps(plan: Plan) -> bool:
    """Whether gradients travel while the backward pass goes on.

    They do where a plan only averages gradients or divides them. FSDP2 over gloo waits for each message, and so does the
    next operation under tensor, sequence and pipeline parallel. A plan of both kinds counts as waiting.
    """
    return not plan.fully_sharded and plan.layout.size("tp", "cp", "pp") == 1


def pipelined_by(plan: Plan, models: Sequence[ModelFacts]) -> Pipelined | None:
    """The schedule of a plan's pipeline; None where there is none.

    Args:
        models: those that were prepared; the largest is the one that takes the time.
    """
    if plan.layout.pp == 1:
        return None
    from paceline.parallel.pipeline.pipeline import STRATEGY, divide, microbatches, per_rank
    from paceline.parallel.pipeline.schedules import order

    options = STRATEGY.options(plan)
    ranks = plan.layout.pp
    stages = ranks * per_rank(options)
    facts = max(models, key=lambda model: model.parameters)
    blocks, begins = divide(options, facts, stages)
    weights: Sequence[float] = options.weights if options.split == "time" else _computing(facts, blocks)
    ends = (*begins[1:], len(blocks))
    of_stage = [sum(weights[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    actions = order(options.schedule, ranks, per_rank(options), microbatches(options, ranks))
    own = mean(of_stage[stage] for stage in {stage for _, stage, _ in actions[0]})
    return Pipelined(actions, [weight / own for weight in of_stage], max(1, plan.accumulate))


def _computing(facts: ModelFacts, blocks: Sequence[str]) -> Sequence[float]:
    """How much each block computes for a token, in proportion: by the elements of its weights, tables left out.

    A convolution uses its weights as often as its output has places, which are not known here: such blocks count the same.
    """
    layers = [layer for layer in facts.layers if layer.role != "embedding"]
    shapes = [shape for layer in layers for _, shape in layer.shapes]
    weights = loads(replace(facts, layers=tuple(layers)), blocks)
    if any(len(shape) > 2 for shape in shapes) or min(weights) == 0:
        return [1.0] * len(blocks)
    return [float(weight) for weight in weights]
