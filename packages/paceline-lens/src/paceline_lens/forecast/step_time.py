"""`step_time` predicts how long a step takes on a calibrated machine, as a sum of five terms. Pure.

`paceline plan` prints the terms (`report.py`), and `paceline tune` scales them for its candidates (`forecast.py`).

    compute        for each operation of forward and backward: max(FLOP / matrix rate, bytes / memory rate)
    communication  for each message: latency + bytes / link rate, minus what the backward pass hides. Where it hides
                   nothing, a message also waits for the slowest rank
    optimizer      bytes that the optimizer's step reads and writes / optimizer rate
    bubble         how long rank 0 of a pipeline waits for other ranks, from a simulation of the schedule
    overhead       number of operations * seconds of an operation that computes next to nothing

The work is that of rank 0 in a rehearsal. It is assumed that the other stages of a pipeline need more or less time in
proportion to the weights that they compute with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.plan.plan import Plan
from paceline.plan.timetable import Timetable
from paceline_lens.forecast.calibration import Calibration
from paceline_lens.forecast.work import Message, Work


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of one step.

    Attributes:
        compute_s, communication_s, optimizer_s, bubble_s, overhead_s: the terms. `bubble_s` may be below 0: rank 0 computes
            faster while others wait, and may gain more in this way than it waits itself.
        hidden_s: seconds of communication that the backward pass hides; they are not part of the sum.
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
        """The seconds of the whole step."""
        return self.compute_s + self.communication_s + self.optimizer_s + self.bubble_s + self.overhead_s

    def terms(self, calibration: Calibration) -> Iterator[tuple[str, float, str]]:
        """Yields each term with its seconds and the source of these, for people."""
        matrix_rate = max(rate for _, rate in calibration.matrix["float32"])
        memory_rate = max(rate for _, rate in calibration.memory)
        source = (
            f"matrix products at up to {matrix_rate / 1e9:.0f} GFLOP/s, others at up to {memory_rate / 1e9:.1f} GB/s"
        )
        yield "compute", self.compute_s, source
        links = [f"{name} {link.bytes_per_s / 1e9:.2f} GB/s" for name, link in calibration.links.items()]
        source = ", ".join(links) or "not measured"
        if self.hidden_s:
            source += f"; another {self.hidden_s * 1e3:.1f} ms are hidden by the backward pass"
        yield "communication", self.communication_s, source
        optimizer_rate = calibration.optimizer or memory_rate
        yield "optimizer", self.optimizer_s, f"its step moves {optimizer_rate / 1e9:.1f} GB/s"
        source = "waiting by the schedule of a pipeline"
        if self.bubble_s:
            source += f"; a rank computes {calibration.alone:.2f} times as fast while the others wait"
        yield "bubble", self.bubble_s, source
        yield "overhead", self.overhead_s, f"{calibration.overhead_s * 1e6:.1f} us for each operation"


def step_time(
    work: Work,
    calibration: Calibration,
    beside: Beside | None = None,
    timetable: Timetable | None = None,
    batches: int = 1,
) -> StepTime:
    """Predicts the time of a step.

    Args:
        work: what rank 0 does in the step.
        calibration: the measurements of the machine, with the same number of ranks.
        beside: which messages travel while the model computes; see `beside_computing`. None: none of them.
        timetable: of the pipeline, if there is one.
        batches: how many batches the step has.
    """
    seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    operations = dict.fromkeys(seconds, 0)
    for computation, count in work.computations.items():
        operations[computation.phase] += count
        if computation.phase == "optimizer":
            seconds["optimizer"] += count * calibration.optimizer_seconds(computation.bytes)
            continue
        seconds[computation.phase] += count * calibration.compute_seconds(computation)
    sending = 0.0
    may_be_hidden = dict.fromkeys(seconds, 0.0)
    unknown: set[str] = set()
    for message, count in work.messages.items():
        link = calibration.link_of(message)
        if link is None:
            unknown.add(message.operation)
            continue
        message_s = link.seconds(count * message.bytes, count)
        sending += message_s
        # A stage of a pipeline does not wait when it sends. Its wait for messages of other stages is part of the bubble.
        is_between_stages = timetable is not None and message.operation == "send"
        if beside is not None and beside.covers(message):
            may_be_hidden[message.phase] += message_s
        elif not is_between_stages:
            sending += count * calibration.wait_s
    hidden = 0.0
    for phase in ("forward", "backward"):
        hidden += calibration.overlap * min(may_be_hidden[phase], seconds[phase])
    compute = seconds["forward"] + seconds["backward"]
    overhead = sum(operations.values()) * calibration.overhead_s
    waiting = 0.0
    if timetable is not None:
        forward_s = seconds["forward"] + operations["forward"] * calibration.overhead_s
        backward_s = seconds["backward"] + operations["backward"] * calibration.overhead_s
        waiting = timetable.seconds(forward_s, backward_s, batches, calibration.alone) - forward_s - backward_s
    return StepTime(compute, sending - hidden, seconds["optimizer"], waiting, overhead, hidden, tuple(sorted(unknown)))


@dataclass(frozen=True)
class Beside:
    """Which messages travel while the model computes.

    Attributes:
        phases: "forward" and "backward", or one of them.
        waited_for: operations, and sizes of groups, whose messages the next operation of the model needs.
    """

    phases: tuple[str, ...]
    waited_for: tuple[str | int, ...] = ()

    def covers(self, message: Message) -> bool:
        """Returns whether such a message travels beside."""
        is_waited_for = message.ranks in self.waited_for or message.operation in self.waited_for
        return message.phase in self.phases and not is_waited_for


def beside_computing(plan: Plan, calibration: Calibration) -> Beside | None:
    """Returns which messages of a plan travel while the model computes.

    The gradients of replicas do so in the backward pass. The parameters of FSDP2 do so in both passes, unless gloo sends them:
    then each message is waited for. The next operation also waits for messages of tensor, sequence and pipeline parallel. Over
    gloo a plan of both kinds counts as waiting.
    """
    layout = plan.layout
    if calibration.prefetches:
        phases = ("forward", "backward") if plan.fully_sharded else ("backward",)
        # Attention over several ranks sends or exchanges. Groups are told apart by their size alone.
        waited_for: list[str | int] = ["send", "alltoall"]
        if layout.tp not in (layout.size("shard", "cp"), layout.replicate):
            waited_for.append(layout.tp)
        return Beside(phases, tuple(waited_for))
    if plan.fully_sharded or layout.size("tp", "cp", "pp") > 1:
        return None
    return Beside(("backward",))
