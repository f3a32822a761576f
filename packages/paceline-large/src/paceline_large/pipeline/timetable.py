"""When each rank of a pipeline works on which micro-batch: the order of a schedule, played on a time axis. Pure arithmetic.

    `simulate` plays an order of actions, by default with unit costs: F = 1, B = 2 = I + W

Sources: Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(1F1B and interleaved), 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Action = tuple[str, int, int]  # F, B, I or W; stage; micro-batch
LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class PipelineTimetable:
    """The order in which the ranks of a pipeline work on one batch, and how long each stage takes.

    Attributes:
        order: the actions of each rank, in order.
        shares: how long each stage takes, in units of the mean of the stages of rank 0.
    """

    order: Mapping[int, Sequence[Action]]
    shares: Sequence[float]

    def text(self) -> str:
        """Returns a drawing of the order, with unit costs; see `Timeline.text`."""
        return simulate(self.order).text()

    def seconds(self, forward_s: float, backward_s: float, batches: int, alone: float) -> float:
        """Returns the seconds of one step, from its first forward pass to its last backward pass.

        Args:
            forward_s, backward_s: seconds that rank 0 computes in the step while all ranks compute.
            batches: how many batches the step has.
            alone: how many times as fast a rank computes while the others wait.
        """
        passes = batches * sum(op == "F" for op, _, _ in self.order[0])
        pass_s = {
            "F": forward_s / passes,
            "B": backward_s / passes,
            # Some schedules divide a backward pass into two halves: gradients of inputs, and of weights.
            "I": backward_s / passes / 2,
            "W": backward_s / passes / 2,
        }
        batch = simulate(self.order, lambda op, stage: pass_s[op] * self.shares[stage], alone)
        return batches * batch.length


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
