"""A pipeline on paper: which blocks each stage runs, which ranks run it, and how long ranks wait. Pure arithmetic.

    blocks    0 1 2 3 | 4 5 6 7              `split`: contiguous, as even as the weights allow
    ranks     loop: 0 1 .. p-1 0 1 ..        stage s runs on rank s % p
              v:    0 1 .. p-1 p-1 .. 1 0    for schedules in which the last stage shares rank 0 with the first
    time      `simulate` plays an order of actions, by default with unit costs: F = 1, B = 2 = I + W

Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(1F1B and interleaved), 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, prod

from paceline.plan.facts import ModelFacts

Action = tuple[str, int, int]  # F, B, I or W; stage; micro-batch
LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}


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


@dataclass(frozen=True)
class Cell:
    """One action on the time axis: `op` of `stage` on a micro-batch, from `start` on, for `length` units of time."""

    op: str
    stage: int
    microbatch: int
    start: float
    length: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank over time, in units of one forward pass, or of the lengths that were given.

    Attributes:
        ranks: the actions of each rank, in order.
        length: the time at which the last one ends.
    """

    ranks: tuple[tuple[Cell, ...], ...]
    length: float

    @property
    def bubble(self) -> float:
        """The share of time in which ranks wait."""
        busy = 0.0
        for cells in self.ranks:
            busy += sum(cell.length for cell in cells)
        return 1 - busy / (self.length * len(self.ranks))

    def text(self) -> str:
        """One row a rank: F forward, B backward, I and W its halves (inputs, weights), with the micro-batch's number;
        small letters for the rank's later stages, dots while it waits. Lengths have to be `LENGTHS`."""
        last_microbatch = 0
        for cells in self.ranks:
            for cell in cells:
                last_microbatch = max(last_microbatch, cell.microbatch)
        # The characters of one unit of time: a letter, the longest number, and a space.
        unit = len(str(last_microbatch)) + 2
        waiting = ".".ljust(unit)
        rows = []
        for rank, cells in enumerate(self.ranks):
            row = ""
            now = 0.0
            first = min(cell.stage for cell in cells)
            for cell in cells:
                row += waiting * int(cell.start - now)
                letter = cell.op if cell.stage == first else cell.op.lower()
                row += f"{letter}{cell.microbatch}".ljust(int(cell.length) * unit - 1, "-") + " "
                now = cell.start + cell.length
            row += waiting * int(self.length - now)
            rows.append(f"rank {rank}  {row.rstrip()}")
        return "\n".join(rows)


def simulate(
    order: Mapping[int, Sequence[Action]], length_of: Callable[[str, int], float] | None = None, alone: float = 1.0
) -> Timeline:
    """Simulates the orders of all ranks: each action begins as soon as its rank is free and its inputs exist.

    Args:
        order: the actions of each rank, in order.
        length_of: how long an action of a stage takes while all ranks compute; None takes `LENGTHS`.
        alone: how many times as fast a rank computes while all others wait, for ranks that share memory or cores. The speed
            grows linearly with the number of ranks that wait.
    """
    last = 0
    for actions in order.values():
        for _, stage, _ in actions:
            last = max(last, stage)
    ended: set[Action] = set()  # F, or B for a backward pass up to the input
    left = {rank: deque(actions) for rank, actions in order.items()}
    cells: dict[int, list[Cell]] = {rank: [] for rank in order}
    running: dict[int, tuple[Action, float]] = {}  # rank -> what it does, and since when
    remaining: dict[int, float] = {}  # rank -> how much of it, in the time that it takes while all ranks compute
    now = 0.0

    def ready(op: str, stage: int, microbatch: int) -> bool:
        """Returns whether the inputs of an action exist."""
        if op == "F":
            return stage == 0 or ("F", stage - 1, microbatch) in ended
        if op == "W":
            return ("B", stage, microbatch) in ended
        if ("F", stage, microbatch) not in ended:
            return False
        # The last stage begins its backward pass at the loss. Any other needs the gradient of its output from the next one.
        return stage == last or ("B", stage + 1, microbatch) in ended

    # Each turn of the loop starts every action that can start, and advances the time to the next end of an action. Speeds
    # change only there, as the number of waiting ranks does, so that what remains of an action is kept at full load.
    while True:
        for rank, actions in left.items():
            if rank not in running and actions and ready(*actions[0]):
                action = actions.popleft()
                running[rank] = action, now
                op, stage, _ = action
                remaining[rank] = LENGTHS[op] if length_of is None else length_of(op, stage)
        if not running:
            break
        # Full load is speed 1, and a rank on its own runs at `alone`. If no rank waits, there may be one rank only.
        waiting = len(order) - len(running)
        speed = 1.0
        if waiting:
            speed += (alone - 1.0) * waiting / (len(order) - 1)
        least = min(remaining.values())
        now += least / speed
        for rank, rest in list(remaining.items()):
            # Actions that end at the same time may differ by rounding. Without the tolerance, one would end a turn later.
            if rest > least * (1 + 1e-9):
                remaining[rank] = rest - least
                continue
            (op, stage, microbatch), since = running.pop(rank)
            del remaining[rank]
            cells[rank].append(Cell(op, stage, microbatch, since, now - since))
            # Nothing waits for W. I is the part of a backward pass that the previous stage waits for, so that it counts as B.
            if op != "W":
                ended.add(("F" if op == "F" else "B", stage, microbatch))
    assert not any(left.values()), "an order in which every rank waits for another"
    return Timeline(tuple(tuple(cells[rank]) for rank in sorted(cells)), now)


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
