"""Compares two runs of one script, step by step: which number differs first, and whether rounding explains it. Pure.

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

from paceline_lens.verify.recording import Event, Recording

SINGLE_EPS = 2.0**-23
DOUBLE_EPS = 2.0**-52
EPS = {"float32": SINGLE_EPS, "float64": DOUBLE_EPS, "bfloat16": 2.0**-7, "float16": 2.0**-10}
# A difference by rounding falls by DOUBLE_EPS / SINGLE_EPS in float64, and any other not at all. Halfway between the two, on
# the scale of exponents, is where they are told apart.
SHRINKS = math.sqrt(DOUBLE_EPS / SINGLE_EPS)
# Where even float64 runs are so close, nothing but rounding is left: halfway between the two precisions.
DOUBLE_FLOOR = math.sqrt(DOUBLE_EPS * SINGLE_EPS)
# A difference up to so many times the measured growth of rounding still counts as rounding: the measurement is one run, and
# rounding errors of another run may well be larger.
GROWTH_MARGIN = 32.0
# How many times the machine epsilon two equal runs may differ in the first step that differs. How far rounding grows within
# that step is not measured, so that the margin is much wider: 1024 roundings, which are 1e-4 in float32.
ONSET_MARGIN = GROWTH_MARGIN**2
_SMALL_PART = 1e-6
# The kinds of differences, in the order in which a step computes them.
FIELDS = ("rows", "learning rate", "loss", "gradient", "buffer", "weight", "logged", "gathered")

Named = Mapping[str, Sequence[float]]


@dataclass
class RecordedStep:
    """One optimizer step of all ranks.

    Attributes:
        number: the number of the step, counted from 1.
        optimizer: which of the script's optimizers stepped.
        rows: the real rows that all ranks together read for it, without filler.
        rows_of_rank: the real rows of each share of the data, in order.
        filler: the number of further rows, which only fill up batches.
        passes: the number of backward passes on one rank.
        loss: the loss of the global batch; None if there was no backward pass through Paceline.
        divided: whether a loss was the result of a division or a product when the script passed it to the backward pass.
        draws: the generators from which the forward passes drew numbers, except for dropout.
        rates: the learning rates.
        gradients, weights, buffers: sketches of the tensors, by name.
        by_rank: the event of this step on each rank.
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
class RecordedRun:
    """All ranks of a run in one view.

    Attributes:
        name: a name for reports, such as "1 process" or "zero=2, 4 processes".
        recordings: the recordings of all ranks.
        readers: one recording for each share of the data.
        steps: the steps, in order.
    """

    name: str
    recordings: list[Recording]
    readers: list[Recording]
    steps: list[RecordedStep]

    @classmethod
    def of(cls, name: str, recordings: Sequence[Recording]) -> RecordedRun:
        """Combines the recordings of all ranks."""
        # Ranks of tensor or pipeline parallelism read the same share of the data. One of them stands for the share, so that
        # no row is counted twice.
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
        steps_by_reader = [events_by_step(recording) for recording in readers]
        steps_by_rank = [events_by_step(recording) for recording in recordings]
        # Only steps that all ranks have recorded can be combined.
        shortest = min(map(len, steps_by_rank), default=0)
        steps: list[RecordedStep] = []
        for number in range(shortest):
            of_readers = [steps_of_reader[number] for steps_of_reader in steps_by_reader]
            ends = [steps_of_rank[number][-1] for steps_of_rank in steps_by_rank]
            steps.append(_step(number + 1, of_readers, ends))
        return cls(name, list(recordings), readers, steps)

    @property
    def width(self) -> int:
        """The number of shares into which each batch is divided."""
        return len(self.readers)

    @property
    def rows(self) -> set[str]:
        """All rows that any step has read."""
        rows: set[str] = set()
        for step in self.steps:
            rows.update(step.rows)
        return rows

    def values(self, kind: str) -> list[Event]:
        """Returns the events of one kind on rank 0."""
        return [event for event in self.recordings[0].events if event["kind"] == kind]


def events_by_step(recording: Recording) -> list[list[Event]]:
    """Splits the events of a rank into steps; the last event of each part is the optimizer step itself.

    Events after the last step belong to a step that never ended, and are left out.
    """
    parts: list[list[Event]] = []
    part: list[Event] = []
    for event in recording.events:
        part.append(event)
        if event["kind"] == "step" and "weights" in event:
            parts.append(part)
            part = []
    return parts


def _step(number: int, of_readers: Sequence[Sequence[Event]], by_rank: Sequence[Event]) -> RecordedStep:
    """Combines one step of all ranks.

    Args:
        number: the number of the step, counted from 1.
        of_readers: all events of the step, of one rank for each share of the data.
        by_rank: the optimizer step itself, of all ranks.
    """
    first = by_rank[0]
    step = RecordedStep(number, first["optimizer"], rates=first["rates"], by_rank=list(by_rank))
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
    # A script that says how many items a loss sums over gets their mean over all ranks. Otherwise each rank's loss is a
    # mean, and the loss of the global batch is the mean of these.
    if items:
        step.loss = item_sum / items
    elif has_loss:
        step.loss = scaled / len(of_readers)
    # Ranks of a pipeline hold the tensors of their own stages, so that all ranks must be merged. The order is reversed so
    # that the lowest rank that has a tensor wins.
    for rank_event in reversed(by_rank):
        step.gradients = {**step.gradients, **rank_event["gradients"]}
        step.weights = {**step.weights, **rank_event["weights"]}
        step.buffers = {**step.buffers, **rank_event["buffers"]}
    step.gradients = _in_order(step.gradients, by_rank, "gradients")
    return step


def _in_order(named: Named, by_rank: Sequence[Event], kind: str) -> Named:
    """Sorts tensors by their order on the first rank that has them, which is the order in the model."""
    names: dict[str, None] = {}
    for event in by_rank:
        names |= dict.fromkeys(event[kind])
    return {name: named[name] for name in names}


def _rows_read(events: Iterable[Event]) -> tuple[list[str], int]:
    """Returns the rows that training read, and how many further rows were filler.

    They are the rows that the loader returned or, without a prepared loader, the rows that the model was called with.
    """
    # A batch counts only once a backward pass follows: an evaluation between two steps reads rows too, but trains on none.
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
class ValueDifference:
    """One number or tensor that is not the same in two runs.

    Attributes:
        step: the number of the step, counted from 1.
        field: one of FIELDS.
        name: the name of the tensor or value; "" if the field is a single number.
        value, reference: the number, or the norm of the tensor, in the run and in the reference.
        relative: the size of the difference, relative to the reference.
        is_real: whether it is more than rounding.
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
        """The value divided by the reference; 1 if the reference is zero."""
        return self.value / self.reference if self.reference else 1.0

    @property
    def what(self) -> str:
        """What differs, in words."""
        return f"{self.field} of {self.name}" if self.name else self.field


def differences(run: RecordedRun, reference: RecordedRun) -> list[ValueDifference]:
    """Returns all differences, in the order in which the runs computed them."""
    result: list[ValueDifference] = []
    filled = first_filler(run, reference)
    # A run may have ended earlier than the other. Only steps that both have can be compared.
    for step, other in zip(run.steps, reference.steps, strict=False):
        number = step.number
        if number == filled:
            # The script trains on filler, as its choice of a loader makes it. From here on the weights must differ, so that
            # later steps, and what they logged, say nothing about the plan.
            return result
        if step.rows != other.rows:
            num_rows = sum(step.rows.values())
            num_other_rows = sum(other.rows.values())
            missing = sum((other.rows - step.rows).values())
            result.append(ValueDifference(number, "rows", "", num_rows, num_other_rows, missing))
        for place, (rate, other_rate) in enumerate(zip(step.rates, other.rates, strict=False)):
            name = f"group {place}" if len(step.rates) > 1 else ""
            result += _of_numbers(number, "learning rate", name, rate, other_rate)
        if step.loss is not None and other.loss is not None:
            result += _of_numbers(number, "loss", "", step.loss, other.loss)
        result += _of_tensors(number, "gradient", step.gradients, other.gradients)
        result += _of_tensors(number, "buffer", step.buffers, other.buffers)
        result += _of_tensors(number, "weight", step.weights, other.weights)
    return result + _of_values(run, reference)


def beside(run: RecordedRun, plain: RecordedRun) -> tuple[RecordedRun, RecordedRun] | str:
    """Returns two runs of one process such that `differences` compares what both scripts have.

    Args:
        run: the run of a script with Paceline.
        plain: the run of the script from before, whose models are known only from their forward passes.

    Returns:
        Copies of both: tensors have the names of `run`, by their positions in the optimizer. Or why they cannot be compared.
    """
    # The order of several models may differ between the two: then only what the optimizers hold is compared.
    has_one_model = len(run.values("initial")) == len(plain.values("initial")) == 1
    steps: list[RecordedStep] = []
    plain_steps: list[RecordedStep] = []
    for step, other in zip(run.steps, plain.steps, strict=False):
        if len(step.weights) != len(other.weights):
            return (
                f"at step {step.number} the optimizer of the plain script has {len(other.weights)} tensors, and that of the "
                f"script with Paceline {len(step.weights)}"
            )
        names = dict(zip(other.weights, step.weights, strict=True))
        gradients = {names[name]: value for name, value in other.gradients.items()}
        weights = {names[name]: value for name, value in other.weights.items()}
        rows = step.rows
        other_rows = other.rows
        buffers = step.buffers
        # The plain model is found by its first call, whose input was not seen.
        if not has_one_model or step.number == 1 or not rows or not other_rows:
            rows = Counter()
            other_rows = rows
        if not has_one_model:
            buffers = {}
        steps.append(replace(step, rows=rows, buffers=buffers))
        plain_steps.append(replace(other, gradients=gradients, weights=weights, rows=other_rows))
    return replace(run, steps=steps), replace(plain, steps=plain_steps)


def first_filler(run: RecordedRun, reference: RecordedRun) -> int:
    """Returns the first step that trains on more or fewer filler rows than the reference, or 0.

    From this step on the runs cannot be compared.
    """
    for step, other in zip(run.steps, reference.steps, strict=False):
        if step.filler != other.filler and step.rows == other.rows:
            return step.number
    return 0


def _of_values(run: RecordedRun, reference: RecordedRun) -> list[ValueDifference]:
    """Returns the differences between what both runs logged and gathered."""
    result: list[ValueDifference] = []
    last = len(reference.steps)
    for number, (event, other) in enumerate(zip(run.values("logged"), reference.values("logged"), strict=False), 1):
        # A script need not name the step of a logged value. Most scripts log once a step, so that the position stands for it.
        step = event["step"] or min(number, last)
        for name, value in event["values"].items():
            if name in other["values"]:
                result += _of_numbers(step, "logged", name, value, other["values"][name])
    gathered = run.values("gathered")
    others = reference.values("gathered")
    # transformers' Trainer gathers more often when there are several processes. Then the calls of the two runs cannot be
    # matched, and none of them is compared.
    pairs = zip(gathered, others, strict=True) if len(gathered) == len(others) else ()
    for number, (event, other) in enumerate(pairs, 1):
        if event["how"] == other["how"] != "reduce" and event["num_rows"] != other["num_rows"]:
            name = f"call {number} of {event['how']}"
            result.append(ValueDifference(last, "gathered", name, event["num_rows"], other["num_rows"], 1.0))
    return result


def _of_numbers(step: int, kind: str, name: str, value: float, reference: float) -> list[ValueDifference]:
    # Two NaN are no difference: both runs have diverged alike.
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return []
    distance = abs(value - reference)
    relative = math.inf
    if math.isfinite(distance):
        relative = distance / max(abs(reference), _SMALL_PART)
    return [ValueDifference(step, kind, name, value, reference, relative)]


def _of_tensors(step: int, kind: str, values: Named, references: Named) -> list[ValueDifference]:
    # The values are sketches (`sketch.py`). The norm of a sketch is about that of its tensor.
    total = math.sqrt(sum(_norm(reference) ** 2 for reference in references.values()))
    result: list[ValueDifference] = []
    for name, value in values.items():
        reference = references.get(name)
        if reference is None or list(value) == list(reference):
            continue
        size = _norm(reference)
        distance = _norm([x - y for x, y in zip(value, reference, strict=False)])
        # A gradient that is zero except for rounding would differ by all of itself: see the docstring of this module.
        scale = max(size, _SMALL_PART * total) or 1.0
        relative = math.inf
        if math.isfinite(distance):
            relative = distance / scale
        result.append(ValueDifference(step, kind, name, _norm(value), size, relative))
    return result


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


# -- rounding --------------------------------------------------------------------------------------------------------


def judged_by_double(single: Sequence[ValueDifference], double: Sequence[ValueDifference]) -> list[ValueDifference]:
    """Returns the differences in float64, each with whether it is real.

    Args:
        single: the differences of the same runs in the script's precision.
        double: the differences in float64.
    """
    largest = _largest_so_far(single)
    return _judged(double, lambda difference: DOUBLE_FLOOR + SHRINKS * largest(difference))


def judged_by_growth(
    single: Sequence[ValueDifference], nudged: Sequence[ValueDifference], eps: float
) -> list[ValueDifference]:
    """Returns the differences in the script's precision, each with whether it is real.

    Args:
        single: the differences to judge.
        nudged: the differences of two one-process runs, of which one began with weights that were changed by one rounding.
        eps: the machine epsilon of the precision in which the script computes.
    """
    largest = _largest_so_far(nudged)
    return _judged(single, lambda difference: GROWTH_MARGIN * max(eps, largest(difference)))


def _judged(apart: Sequence[ValueDifference], limit_of: Callable[[ValueDifference], float]) -> list[ValueDifference]:
    """Returns the differences, each with whether it is above its limit."""
    result: list[ValueDifference] = []
    for difference in apart:
        is_real = _is_exact(difference) or difference.relative > limit_of(difference)
        result.append(replace(difference, is_real=is_real))
    return result


def judged_by_onset(repeated: Sequence[ValueDifference], eps: float) -> list[ValueDifference]:
    """Returns the differences between two runs of one script on one process, each with whether it is real.

    If the runs differ only in the order of additions, the first step that differs does so by rounding alone. Differences of
    later steps may have grown from it. So the first step decides for all.

    Args:
        repeated: the differences of the second run from the first.
        eps: the machine epsilon of the precision in which the script computes.
    """
    onset = min((difference.step for difference in repeated), default=0)
    is_real = False
    for difference in repeated:
        if difference.step == onset:
            is_real = is_real or _is_exact(difference) or difference.relative > ONSET_MARGIN * eps
    return [replace(difference, is_real=is_real) for difference in repeated]


def is_plain(differences_of_run: Sequence[ValueDifference]) -> bool:
    """Returns whether rounding cannot have made the first difference, so that there is nothing to judge."""
    first = next(iter(differences_of_run), None)
    return first is not None and first.field in ("rows", "learning rate") and first.relative > _SMALL_PART


def _is_exact(difference: ValueDifference) -> bool:
    """Returns whether the difference is one of counts: rows are the same or not, and rounding has no part in that."""
    return difference.field in ("rows", "gathered")


def _largest_so_far(differences: Sequence[ValueDifference]) -> Callable[[ValueDifference], float]:
    """Returns a function that finds the largest difference in the same field up to the same step."""
    # By field: the steps in ascending order, and the largest difference up to each of them. `largest` has one entry more, a 0
    # at its beginning for the steps before the first difference.
    steps: dict[str, list[int]] = {}
    largest: dict[str, list[float]] = {}
    # Logged values come after all tensors, and their steps are those that the script names.
    for difference in sorted(differences, key=lambda difference: difference.step):
        if not _is_exact(difference) and math.isfinite(difference.relative):
            steps.setdefault(difference.field, []).append(difference.step)
            sizes = largest.setdefault(difference.field, [0.0])
            sizes.append(max(sizes[-1], difference.relative))

    def largest_until(difference: ValueDifference) -> float:
        place = bisect_right(steps.get(difference.field, []), difference.step)
        return largest.get(difference.field, [0.0])[place]

    return largest_until
