"""`StepTime`: how long a step takes on a calibrated machine, as a sum of five terms. Pure.

    compute        every operation of forward and backward: max(FLOP / matrix rate, bytes / memory rate)
    communication  every message: latency + bytes / link rate, less what the backward pass hides, and more by the wait for
                   the slowest rank where it hides nothing
    optimizer      bytes that its step reads and writes / optimizer rate
    bubble         how long a rank of a pipeline waits for the others
    overhead       operations x seconds of an empty one

The work is that of rank 0 in a rehearsal, so a pipeline's first stage stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.plan.plan import Plan
from paceline.planner.calibration import Calibration
from paceline.planner.work import Work


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute_s, communication_s, optimizer_s, bubble_s, overhead_s: the terms.
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
        yield "bubble", self.bubble_s, "waiting of a pipeline's ranks, by its schedule"
        yield "overhead", self.overhead_s, f"{calibration.overhead_s * 1e6:.1f} us for each operation"


def step_time(work: Work, calibration: Calibration, overlaps: bool = False, bubble: float = 0.0) -> StepTime:
    """The time of a step.

    Args:
        work: of rank 0.
        calibration: of the machine, with as many ranks.
        overlaps: whether messages of the backward pass travel while it goes on; see `overlaps`.
        bubble: the share of its time in which a rank of a pipeline waits, 0 to 1.
    """
    seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    operations = 0
    for computation, count in work.computations.items():
        operations += count
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
        if overlaps and message.phase == "backward":
            beside_backward += spent
        else:
            sending += count * calibration.wait_s
    hidden = calibration.overlap * min(beside_backward, seconds["backward"])
    compute = seconds["forward"] + seconds["backward"]
    overhead = operations * calibration.overhead_s
    # The formulas of schedules give the waiting as a share of the whole time, of which work is the rest.
    waiting = (compute + overhead) * bubble / (1 - bubble)
    return StepTime(compute, sending - hidden, seconds["optimizer"], waiting, overhead, hidden, tuple(sorted(unknown)))


def overlaps(plan: Plan) -> bool:
    """Whether gradients travel while the backward pass goes on.

    They do where a plan only averages gradients or divides them. FSDP2 over gloo waits for each message, and so does the
    next operation under tensor, sequence and pipeline parallel. A plan of both kinds counts as waiting.
    """
    return not plan.fully_sharded and plan.layout.size("tp", "cp", "pp") == 1


def bubble_of(plan: Plan) -> float:
    """The share of its time in which a rank of a plan's pipeline waits; 0 where there is no pipeline."""
    if plan.layout.pp == 1:
        return 0.0
    from paceline.parallel.pipeline.pipeline import STRATEGY, microbatches, per_rank
    from paceline.plan.pipeline import SCHEDULES

    options = STRATEGY.options(plan)
    ranks = plan.layout.pp
    return SCHEDULES[options.schedule].bubble(microbatches(options, ranks), ranks, per_rank(options))
