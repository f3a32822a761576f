"""Names of schedules -> `torch.distributed.pipelining`: what runs, in which order, and a drawing of it.

torch is imported when something is asked for: `paceline plan --draw` needs it only where a pipeline is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from paceline_large.pipeline.split import SCHEDULES, rank_of
from paceline_large.pipeline.timetable import Action, Timeline, simulate

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "breadth-first": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_COMPUTE = ("F", "B", "I", "W")  # torch's letters for what computes; the others communicate


def build(name: str, stages: list[Any], microbatches: int, loss_fn: Callable[..., Any]) -> Any:
    """torch's schedule object for the stages of this rank, each a `PipelineStage`."""
    from torch.distributed.pipelining import schedules

    if name == "breadth-first" and len(stages) == 1:
        name = "gpipe"  # the same order
    kind = getattr(schedules, _CLASSES[name])
    stages_or_stage = stages
    if issubclass(kind, schedules.PipelineScheduleSingle):
        stages_or_stage = stages[0]
    # Gradients are scaled by `Pipe`, whose losses have their share of the factor already.
    return kind(stages_or_stage, microbatches, loss_fn=loss_fn, scale_grads=False)


def order(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> dict[int, list[Action]]:
    """Returns the actions of each rank that compute, in the order in which torch runs them."""
    of_rank: dict[int, list[Action]] = {}
    if name in ("gpipe", "1f1b"):  # torch's tables of these two are not what it runs: 1F1B's last rank starts at F1
        for rank in range(ranks):
            # GPipe runs all forward passes first; under 1F1B as many are ahead as there are stages from here to the end.
            if name == "gpipe":
                ahead = microbatches
            else:
                ahead = ranks - rank
            of_rank[rank] = _single(rank, ahead, microbatches)
        return of_rank
    placement = SCHEDULES[name].placement
    count = ranks * stages_per_rank
    # torch makes its table from stages; these have the attributes that it reads, so that no model and no group is needed.
    own: list[Any] = []
    for stage in range(count):
        if rank_of(stage, ranks, placement) == 0:
            own.append(
                SimpleNamespace(
                    stage_index=stage,
                    num_stages=count,
                    group_size=ranks,
                    group_rank=0,
                    is_first=stage == 0,
                    is_last=stage == count - 1,
                    submod=SimpleNamespace(modules=list),
                )
            )
    table = build(name, own, microbatches, lambda output, target: output).pipeline_order
    for rank, actions in table.items():
        of_rank[rank] = []
        for action in actions:
            if action is None:  # the rank waits
                continue
            # Schedules that overlap passes list two actions as one with parts.
            for part in action.sub_actions or (action,):
                kind = part.computation_type.value
                if kind in _COMPUTE:
                    of_rank[rank].append((kind, part.stage_index, part.microbatch_index))
    return of_rank


def _single(rank: int, ahead: int, microbatches: int) -> list[Action]:
    """One stage a rank: at most `ahead` forward passes before their backward pass."""
    actions: list[Action] = [("F", rank, number) for number in range(min(ahead, microbatches))]
    for number in range(microbatches):
        actions.append(("B", rank, number))
        if ahead + number < microbatches:
            actions.append(("F", rank, ahead + number))
    return actions


def timeline(name: str, stages: int, microbatches: int, stages_per_rank: int | None = None) -> Timeline:
    """When each rank does what under a schedule; `stages` counts those of all ranks."""
    count = stages_per_rank or SCHEDULES[name].stages_per_rank
    return simulate(order(name, stages // count, count, microbatches))


def draw(name: str, stages: int, microbatches: int, stages_per_rank: int | None = None) -> str:
    """Returns the schedule as text: one row a rank, time from left to right; see `Timeline.text`.

    Args:
        name: of the schedule, such as "1f1b".
        stages: of all ranks together.
        microbatches: in one batch.
        stages_per_rank: None takes the schedule's own number.

    Example:
        >>> print(draw("1f1b", 2, 3))
        rank 0  F0 F1 .  B0--- F2 B1--- .  B2---
        rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    return timeline(name, stages, microbatches, stages_per_rank).text()
