"""Two runs of one script, step by step: which number differs first, and whether rounding explains it. Pure.

    recordings of all ranks --Run.of--> Run (one view of the run: rows, loss, gradients, weights of each step)
    differences(run, reference)         every field of every step that is not the same to the bit, with its size
    judged(single, double)              which of them are real: a difference that rounding has made all but vanishes in
                                        float64, and any other stays

The size of a difference is relative: to the tensor's norm in the reference run, or where that is smaller, to a small part of
the norm of all tensors together, since a gradient that is zero but for rounding differs by all of itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.verify.recording import Event, Recording

SINGLE_EPS = 2.0**-23
DOUBLE_EPS = 2.0**-52
EPS = {"float32": SINGLE_EPS, "float64": DOUBLE_EPS, "bfloat16": 2.0**-7, "float16": 2.0**-10}
# A difference by rounding falls by DOUBLE_EPS / SINGLE_EPS in float64, and any other not at all. Halfway between the two, on
# the scale of exponents, is where they are told apart.
SHRINKS = math.sqrt(DOUBLE_EPS / SINGLE_EPS)
# Where even float64 runs are so close, nothing but rounding is left: halfway between the two precisions.
DOUBLE_FLOOR = math.sqrt(DOUBLE_EPS * SINGLE_EPS)
# Of a measured growth of rounding, so much more is still taken for rounding: one run is one draw of it.
GROWTH_MARGIN = 32.0
_SMALL_PART = 1e-6
# In the order in which a step computes them.
FIELDS = ("rows", "learning rate", "loss", "gradient", "buffer", "weight", "logged", "gathered")

Named = Mapping[str, Sequence[float]]


@dataclass
class Step:
    """One optimizer step of all ranks.

    Attributes:
        number: from 1.
        optimizer: which one has stepped.
        rows: the real rows that all ranks together have read for it; filler is left out.
        rows_of_rank: those of each share of the data, in order.
        filler: rows beside them that only fill up batches.
        passes: backward passes on one rank.
        loss: of the global batch; None where there was no backward pass of ours.
        divided: whether each loss was a quotient or a product when it was given.
        draws: the generators from which the forward passes have drawn, other than for a dropout.
        rates: learning rates.
        gradients, weights, buffers: sketches by name.
        by_rank: the step's event of each rank.
    """

    number: int
    optimizer: int
    rows: Counter[str] = field(default_factory=Counter)
    rows_of_rank: list[list[str]] = field(default_factory=list)
    filler: int = 0
    passes: int = 0
    loss: float | None = None
    divided: bool = False
    draws: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    weights: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    by_rank: list[Event] = field(default_factory=list)


@dataclass
class Run:
    """All ranks of a run in one view.

    Attributes:
        name: such as "1 process" or "zero=2, 4 processes".
        recordings: of all ranks.
        readers: one recording for each share of the data.
        steps: in order.
    """

    name: str
    recordings: list[Recording]
    readers: list[Recording]
    steps: list[Step]

    @classmethod
    def of(cls, name: str, recordings: Sequence[Recording]) -> Run:
        """Puts the recordings of all ranks together."""
        by_share: dict[int, Recording] = {}
        for recording in recordings:
            by_share.setdefault(recording.data_index, recording)
        width = max((recording.width for recording in recordings), default=1)
        # A script that has prepared no model has no plan: each of its ranks may read rows of its own.
        planned = any(recording.of_kind("prepared") for recording in recordings)
        if not planned:
            readers = list(recordings)
        elif width == 1:
            readers = list(recordings[:1])
        else:
            readers = [by_share[index] for index in sorted(by_share)]
        steps_by_reader = [_steps(recording) for recording in readers]
        steps_by_rank = [_steps(recording) for recording in recordings]
        shortest = min(map(len, steps_by_rank), default=0)
        steps: list[Step] = []
        for number in range(shortest):
            of_readers = [steps_of_reader[number] for steps_of_reader in steps_by_reader]
            ends = [steps_of_rank[number][-1] for steps_of_rank in steps_by_rank]
            steps.append(_step(number + 1, of_readers, ends))
        return cls(name, list(recordings), readers, steps)

    @property
    def width(self) -> int:
        """Shares of each batch."""
        return len(self.readers)

    @property
    def rows(self) -> set[str]:
        """All rows that some step has read."""
        rows: set[str] = set()
        for step in self.steps:
            rows.update(step.rows)
        return rows

    def values(self, kind: str) -> list[Event]:
        """The events of one kind on rank 0."""
        return [event for event in self.recordings[0].events if event["kind"] == kind]


def _steps(recording: Recording) -> list[list[Event]]:
    """The events of each step, of which the last is the step itself."""
    parts: list[list[Event]] = []
    part: list[Event] = []
    for event in recording.events:
        part.append(event)
        if event["kind"] == "step" and "weights" in event:
            parts.append(part)
            part = []
    return parts


def _step(number: int, of_readers: Sequence[Sequence[Event]], by_rank: Sequence[Event]) -> Step:
    first = by_rank[0]
    step = Step(number, first["optimizer"], rates=first["rates"], by_rank=list(by_rank))
    scaled = 0.0
    has_loss = False
    items = 0.0
    item_sum = 0.0
    for events in of_readers:
        rows, filler = _rows_read(events)
        step.filler += filler
        step.rows_of_rank.append(rows)
        step.rows.update(rows)
        passes = [event for event in events if event["kind"] == "backward"]
        step.passes = max(step.passes, len(passes))
        step.divided = step.divided or any(event["divided"] for event in passes)
        for event in passes:
            has_loss = True
            step.draws += [name for name in event["draws"] if name not in step.draws]
            scaled += event["scaled"]
            if event["items"] is not None:
                items += event["items"]
                item_sum += event["loss"]
    if items:
        step.loss = item_sum / items
    elif has_loss:
        step.loss = scaled / len(of_readers)
    # Ranks of a pipeline hold the tensors of their own stages.
    for rank_event in reversed(by_rank):
        step.gradients = {**step.gradients, **rank_event["gradients"]}
        step.weights = {**step.weights, **rank_event["weights"]}
        step.buffers = {**step.buffers, **rank_event["buffers"]}
    step.gradients = _in_order(step.gradients, by_rank, "gradients")
    return step


def _in_order(named: Named, by_rank: Sequence[Event], kind: str) -> Named:
    """By the order of the first rank that has each name, which is that of the model."""
    names: dict[str, None] = {}
    for event in by_rank:
        names |= dict.fromkeys(event[kind])
    return {name: named[name] for name in names}


def _rows_read(events: Iterable[Event]) -> tuple[list[str], int]:
    """Rows that training has read, and how many more were filler.

    They are what the loader gave; without a prepared loader, what the model was called with.
    """
    # An evaluation between two steps reads other rows: its batches are followed by a forward pass without gradients.
    rows: list[str] = []
    filler = 0
    waiting: Event | None = None
    called: list[str] = []
    for event in events:
        if event["kind"] == "batch":
            waiting = event
        elif event["kind"] == "forward" and event["grad"]:
            called += event["rows"]
        elif event["kind"] == "backward" and waiting is not None:
            rows += waiting["rows"][: waiting["real"]]
            filler += len(waiting["rows"]) - waiting["real"]
            waiting = None
    return rows or called, filler


# -- differences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One number or tensor that is not the same in two runs.

    Attributes:
        step: where, from 1.
        field: one of FIELDS.
        name: of the tensor or value; "" where the field is one number.
        value, reference: the number, or the norm, in the run and in the reference.
        relative: size of the difference, relative to the reference.
        is_real: whether more than rounding.
    """

    step: int
    field: str
    name: str
    value: float
    reference: float
    relative: float
    is_real: bool = True

    @property
    def ratio(self) -> float:
        """Value by reference; 1 where the reference is zero."""
        return self.value / self.reference if self.reference else 1.0

    @property
    def what(self) -> str:
        """What differs, as a person says it."""
        return f"{self.field} of {self.name}" if self.name else self.field


def differences(run: Run, reference: Run) -> list[Difference]:
    """All differences, in the order in which the runs computed them."""
    result: list[Difference] = []
    filled = first_filler(run, reference)
    for step, other in zip(run.steps, reference.steps, strict=False):
        number = step.number
        if number == filled:
            # Filler is trained on: from here on the weights are others, by the script's choice of a loader.
            return result
        if step.rows != other.rows:
            missing = sum((other.rows - step.rows).values())
            result.append(Difference(number, "rows", "", sum(step.rows.values()), sum(other.rows.values()), missing))
        for place, (rate, other_rate) in enumerate(zip(step.rates, other.rates, strict=False)):
            name = f"group {place}" if len(step.rates) > 1 else ""
            result += _of_numbers(number, "learning rate", name, rate, other_rate)
        if step.loss is not None and other.loss is not None:
            result += _of_numbers(number, "loss", "", step.loss, other.loss)
        result += _of_tensors(number, "gradient", step.gradients, other.gradients)
        result += _of_tensors(number, "buffer", step.buffers, other.buffers)
        result += _of_tensors(number, "weight", step.weights, other.weights)
    return result + _of_values(run, reference)


def first_filler(run: Run, reference: Run) -> int:
    """The first step that trains on filler which the reference does not have, so that no later one can be compared; 0: none."""
    for step, other in zip(run.steps, reference.steps, strict=False):
        if step.filler != other.filler and step.rows == other.rows:
            return step.number
    return 0


def _of_values(run: Run, reference: Run) -> list[Difference]:
    """Of what was logged and gathered."""
    result: list[Difference] = []
    last = len(reference.steps)
    for number, (event, other) in enumerate(zip(run.values("logged"), reference.values("logged"), strict=False), 1):
        step = event["step"] or min(number, last)
        for name in event["values"].keys() & other["values"].keys():
            result += _of_numbers(step, "logged", name, event["values"][name], other["values"][name])
    gathered, others = run.values("gathered"), reference.values("gathered")
    # Where several processes gather something more, as transformers' Trainer does, no call can be told to be that of the other.
    pairs = zip(gathered, others, strict=True) if len(gathered) == len(others) else ()
    for number, (event, other) in enumerate(pairs, 1):
        if event["how"] == other["how"] != "reduce" and event["num_rows"] != other["num_rows"]:
            name = f"call {number} of {event['how']}"
            result.append(Difference(last, "gathered", name, event["num_rows"], other["num_rows"], 1.0))
    return result


def _of_numbers(step: int, kind: str, name: str, value: float, reference: float) -> list[Difference]:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return []
    apart = abs(value - reference)
    relative = apart / max(abs(reference), _SMALL_PART) if math.isfinite(apart) else math.inf
    return [Difference(step, kind, name, value, reference, relative)]


def _of_tensors(step: int, kind: str, values: Named, references: Named) -> list[Difference]:
    total = math.sqrt(sum(_norm(reference) ** 2 for reference in references.values()))
    result: list[Difference] = []
    for name, value in values.items():
        reference = references.get(name)
        if reference is None or list(value) == list(reference):
            continue
        size = _norm(reference)
        apart = _norm([x - y for x, y in zip(value, reference, strict=False)])
        scale = max(size, _SMALL_PART * total) or 1.0
        relative = apart / scale if math.isfinite(apart) else math.inf
        result.append(Difference(step, kind, name, _norm(value), size, relative))
    return result


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


# -- rounding --------------------------------------------------------------------------------------------------------


def judged_by_double(single: Sequence[Difference], double: Sequence[Difference]) -> list[Difference]:
    """The differences in float64, each with whether it is real, given those of the same runs in the script's precision."""
    largest = _largest_so_far(single)
    return _judged(double, lambda difference: DOUBLE_FLOOR + SHRINKS * largest(difference))


def judged_by_growth(single: Sequence[Difference], nudged: Sequence[Difference], eps: float) -> list[Difference]:
    """The differences in the script's precision, each with whether it is real.

    Args:
        nudged: differences of two one-process runs of which one began with weights changed by one rounding.
        eps: of the precision in which the script computes.
    """
    largest = _largest_so_far(nudged)
    return _judged(single, lambda difference: GROWTH_MARGIN * max(eps, largest(difference)))


def _judged(apart: Sequence[Difference], limit_of: Callable[[Difference], float]) -> list[Difference]:
    """Differences, each with whether it is above its limit."""
    result: list[Difference] = []
    for difference in apart:
        is_real = _is_exact(difference) or difference.relative > limit_of(difference)
        result.append(replace(difference, is_real=is_real))
    return result


def judged_by_onset(repeated: Sequence[Difference], eps: float) -> list[Difference]:
    """The differences of a run from the same run, each with whether it is real.

    Where both are the same but for the order of additions, the first step that differs does so by rounding alone; all that
    comes later may have grown from it.
    """
    onset = min((difference.step for difference in repeated), default=0)
    at_onset = [difference for difference in repeated if difference.step == onset]
    limit = GROWTH_MARGIN**2 * eps
    is_real = any(difference.relative > limit or _is_exact(difference) for difference in at_onset)
    return [replace(difference, is_real=is_real) for difference in repeated]


def is_plain(differences_of_run: Sequence[Difference]) -> bool:
    """Whether the first difference is none that rounding could make, so that there is nothing to judge."""
    first = next(iter(differences_of_run), None)
    return first is not None and first.field in ("rows", "learning rate") and first.relative > _SMALL_PART


def _is_exact(difference: Difference) -> bool:
    """Whether rounding has no part in it: rows are the same or not."""
    return difference.field in ("rows", "gathered")


def _largest_so_far(differences: Sequence[Difference]) -> Callable[[Difference], float]:
    """A function that gives the largest difference in the same field up to the same step."""
    steps: dict[str, list[int]] = {}
    largest: dict[str, list[float]] = {}
    # Logged values come after all tensors, and their steps are those that the script names.
    for difference in sorted(differences, key=lambda difference: difference.step):
        if not _is_exact(difference) and math.isfinite(difference.relative):
            steps.setdefault(difference.field, []).append(difference.step)
            sizes = largest.setdefault(difference.field, [0.0])
            sizes.append(max(sizes[-1], difference.relative))

    def largest_until(difference: Difference) -> float:
        place = bisect_right(steps.get(difference.field, []), difference.step)
        return largest.get(difference.field, [0.0])[place]

    return largest_until
