"""A pipeline on paper: which blocks each stage runs, and which ranks run it. Pure arithmetic.

    blocks    0 1 2 3 | 4 5 6 7              `split`: contiguous, as even as the weights allow
    ranks     loop: 0 1 .. p-1 0 1 ..        stage s runs on rank s % p
              v:    0 1 .. p-1 p-1 .. 1 0    for schedules in which the last stage shares rank 0 with the first

Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(1F1B and interleaved), 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, prod

from paceline.plan.facts import ModelFacts


@dataclass(frozen=True)
class PipelineSchedule:
    """One way of ordering the forward and backward passes of micro-batches.

    Attributes:
        name: the name in options.
        stages_per_rank: the default number of stages on one rank.
        most: the largest number of stages on one rank.
        least: the smallest number of stages on one rank.
        placement: "loop" or "v"; see the docstring of this module.
        otherwise: the schedule to use if this one cannot run the number of micro-batches of a batch.
    """

    name: str
    stages_per_rank: int
    least: int
    most: int
    placement: str = "loop"
    otherwise: str = ""

    @property
    def halves(self) -> bool:
        """Whether backward passes have two halves: gradients of inputs at once, and gradients of weights when there is time."""
        # The previous stage waits only for the gradients of its outputs. Those of weights can fill gaps later.
        return self.name in ("zero-bubble", "zbv", "dualpipev")

    def takes(self, microbatches: int, ranks: int) -> bool:
        """Returns whether the schedule can run so many micro-batches on so many ranks."""
        # The conditions are those of torch.distributed.pipelining's schedules, which raise an error otherwise.
        if self.name in ("1f1b", "dualpipev"):
            return microbatches >= ranks * self.least
        # Micro-batches go through the stages of a rank in rounds of equal size, of about as many as there are ranks.
        if self.name in ("interleaved", "zero-bubble"):
            return microbatches % max(1, microbatches // ranks) == 0
        return True

    def bubble(self, microbatches: int, ranks: int, per_rank: int) -> float:
        """Returns the share of time in which a rank waits, where all stages take equally long and micro-batches suffice:
        (p - 1) / (v m + p - 1), and (p - 1) / (3 v m + p - 1) where gradients of weights fill what can be filled."""
        filled = 3 if self.halves else 1
        return (ranks - 1) / (filled * per_rank * microbatches + ranks - 1)


_TABLE = (
    PipelineSchedule("gpipe", 1, 1, 1),
    PipelineSchedule("1f1b", 1, 1, 1, otherwise="gpipe"),
    PipelineSchedule("breadth-first", 2, 1, 64),
    PipelineSchedule("interleaved", 2, 2, 64, otherwise="breadth-first"),
    PipelineSchedule("zero-bubble", 1, 1, 64, otherwise="breadth-first"),
    PipelineSchedule("zbv", 2, 2, 2, "v"),
    PipelineSchedule("dualpipev", 2, 2, 2, "v", otherwise="zbv"),
)
SCHEDULES = {schedule.name: schedule for schedule in _TABLE}


def rank_of(stage: int, ranks: int, placement: str) -> int:
    """Returns the rank along `pp` that runs a stage."""
    lap, place = divmod(stage, ranks)
    goes_back = placement == "v" and lap % 2 == 1
    return ranks - 1 - place if goes_back else place


def choose(schedule: str, wanted: int, rows: int, ranks: int) -> tuple[str, int]:
    """Chooses the number of micro-batches for a batch of `rows`, and the schedule.

    It is the largest number up to `wanted` that divides the rows and that the schedule can run. If there is none, the schedule
    that `otherwise` names takes its place.
    """
    numbers = [number for number in range(min(wanted, rows), 0, -1) if rows % number == 0]
    for number in numbers:
        if SCHEDULES[schedule].takes(number, ranks):
            return schedule, number
    # `otherwise` can run any number, so it gets the largest.
    return SCHEDULES[schedule].otherwise, numbers[0]


def matching(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that a pattern with `*` and `?` matches, part by part: `*` does not cross a dot."""
    wanted = pattern.split(".")
    matched = []
    for name in names:
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            matched.append(name)
    return tuple(matched)


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the index of the first block of each stage, such that the heaviest stage is as light as possible.

    Args:
        weights: the cost of each block, in order; there are at least as many blocks as stages.
        stages: the number of stages.
    """
    count = len(weights)
    # `ends[i]` is the cost of the first i blocks, so that a difference of two is the cost of the blocks between them.
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    # Dynamic programming over stages: `lightest[i]` is the cost of the heaviest of the stages so far when they hold the first
    # i blocks, and `cuts` remembers for each further stage where it then begins.
    lightest = ends[:]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        with_stage = [inf] * (count + 1)
        cut_at = [0] * (count + 1)
        # Each stage has at least one block, so that `end` is at least the number of stages so far.
        for end in range(stage + 1, count + 1):
            for cut in range(stage, end):
                heaviest = max(lightest[cut], ends[end] - ends[cut])
                if heaviest < with_stage[end]:
                    with_stage[end] = heaviest
                    cut_at[end] = cut
        lightest = with_stage
        cuts.append(cut_at)
    # The last stage ends with the last block. Where it begins, the stage before it ends, and so on.
    begins: list[int] = []
    end = count
    for cut_at in reversed(cuts):
        end = cut_at[end]
        begins.append(end)
    return (0, *reversed(begins))


def even(count: int, stages: int) -> tuple[int, ...]:
    """Returns the index of the first block of each stage if all blocks cost the same; earlier stages take the remainder."""
    size, rest = divmod(count, stages)
    return tuple(stage * size + min(stage, rest) for stage in range(stages))


# -- of a model ------------------------------------------------------------------------------------------------


def chain(facts: ModelFacts, patterns: Sequence[str], stages: int) -> tuple[str, ...]:
    """Returns the names of the blocks that run one after the other, in order.

    These are the modules that `patterns` match. Without patterns they are the repeated blocks or, if the model is an
    `nn.Sequential` with fewer repeated blocks than stages, its children.
    """
    names = [name for name, _ in facts.modules]
    if patterns:
        chosen: set[str] = set()
        for pattern in patterns:
            chosen.update(matching(pattern, names))
        return tuple(name for name in names if name in chosen)
    # `modules` begins with the model itself, whose name is "". Names of its children have no dot.
    is_sequence = any(layer.is_sequence for layer in facts.layers if not layer.name)
    if is_sequence and len(facts.blocks) < stages:
        return tuple(name for name in names if name and "." not in name)
    return facts.blocks


def loads(facts: ModelFacts, blocks: Sequence[str]) -> list[int]:
    """Elements that come with each block: its own, and those of the modules defined after it, up to the next block;
    what is defined before the first block comes with that."""
    weights = [0] * len(blocks)
    numbers = {name: number for number, name in enumerate(blocks)}
    current = 0
    for layer in facts.layers:
        # The outermost of the modules around a layer that is a block; a layer outside all blocks stays with the last one.
        parts = layer.name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path in numbers:
                current = numbers[path]
                break
        weights[current] += sum(prod(shape) for _, shape in layer.shapes)
    return weights
