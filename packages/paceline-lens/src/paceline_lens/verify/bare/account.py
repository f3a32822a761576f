"""`Account`: what became of each gradient between the backward pass and the optimizer, on every rank. Pure.

For the first step whose gradients differ from those of one process, each unit (`units.py`) gets a kind, and units of one kind
form a `GradientGroup`:

    factor    all holders have the gradient of one process, times one number
    own       each holder has what its own backward passes gave
    partial   the same, and these add up to the gradient of one process
    scaled    each rank has the gradient of one process, times a number of its own
    some      only some holders have a gradient
    none      no holder has one, but one process has
    differs   anything else

For a group, least squares say of which backward passes of which ranks the gradients are made, and those of one process. All
tensors are sketches, for which sums and factors hold exactly (`sketch.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline_lens.verify.bare.units import HeldUnit, HeldUnits, held_units
from paceline_lens.verify.compare import EPS, GROWTH_MARGIN, ONSET_MARGIN, events_by_step
from paceline_lens.verify.recording import Event, Recording

Vector = NDArray[np.float64]
Kind = Literal["same", "factor", "own", "partial", "scaled", "some", "none", "differs"]
Rows = Literal["divided", "whole", "sliced", "more", "other"]

# Two numbers that explain a gradient count as equal if they differ by less. A factor so close to 2 is no coincidence, and what
# is explained by rounding never gets here.
NEAR = 2e-3
_SMALL_PART = 1e-6  # of the norm of all gradients: below this, a gradient is zero but for rounding


@dataclass
class BareStep:
    """One optimizer step of one rank.

    Attributes:
        event: the step itself.
        passes: the backward passes since the step before.
        forwards: the forward passes, and `calls` the noted calls.
        order: everything, in order.
    """

    event: Event
    order: list[Event]

    def of_kind(self, kind: str) -> list[Event]:
        """Returns the events of one kind."""
        return [event for event in self.order if event["kind"] == kind]

    @cached_property
    def passes(self) -> list[Event]:
        """The backward passes."""
        return self.of_kind("backward")

    @cached_property
    def rows(self) -> list[str]:
        """Digests of the rows that the first model was called with."""
        return [row for event in self.of_kind("forward") if event["number"] == 0 for row in event["rows"]]

    @property
    def loss(self) -> float | None:
        """The sum of the losses of all passes."""
        losses = [event["loss"] for event in self.passes if event["loss"] is not None]
        return sum(losses) if losses else None

    def raw(self, name: str) -> Vector | None:
        """Returns what all passes added to a gradient."""
        parts = [np.asarray(event["raw"][name]) for event in self.passes if name in event["raw"]]
        return sum(parts[1:], parts[0]) if parts else None

    def gradient(self, name: str, part: str = "") -> Vector | None:
        """Returns the gradient that the optimizer found."""
        sketches = self.event["gradients"].get(name)
        return None if sketches is None or part not in sketches else np.asarray(sketches[part])


def steps_of(recording: Recording) -> list[BareStep]:
    """Splits the events of a rank into optimizer steps."""
    return [BareStep(order[-1], order) for order in events_by_step(recording)]


@dataclass
class GradientGroup:
    """Units whose gradients differ in the same way.

    Attributes:
        kind: see the module.
        units: they.
        factor: by which the gradients are too large, if `kind` is "factor".
        factors: the same by rank, if `kind` is "scaled".
        by_rank: how much of what each rank's passes added is in the gradients: for rank 0, by rank; None if nothing fits.
        by_pass: the same by backward pass, of the mean over ranks; then of the rank's own.
        reference_by_rank: how much of it is in the gradients of one process.
    """

    kind: Kind
    units: list[HeldUnit]
    factor: float = 1.0
    factors: Mapping[int, float] = field(default_factory=dict)
    by_rank: Sequence[float] | None = None
    by_pass: tuple[Sequence[float], Sequence[float]] | None = None
    reference_by_rank: Sequence[float] | None = None

    @property
    def names(self) -> str:
        """The first names, for sentences."""
        names = list(dict.fromkeys(unit.name for unit in self.units))
        shown = ", ".join(names[:3])
        return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Account:
    """Compares the ranks of a script with one process.

    Args:
        reference: the recording of one process.
        ranks: the recordings of all ranks.
        nudged: of one process whose weights were changed by one rounding; None if there is none.
        shared: whether batch sizes were divided by the number of ranks.
    """

    def __init__(
        self, reference: Recording, ranks: Sequence[Recording], nudged: Recording | None = None, shared: bool = False
    ) -> None:
        self.reference = steps_of(reference)
        self.recordings = ranks
        self.of_one = reference
        self.ranks = [steps_of(recording) for recording in ranks]
        self.shared = shared
        self.held: HeldUnits = held_units(reference, ranks)
        self.num_steps = min(len(self.reference), *(len(steps) for steps in self.ranks))
        self._eps = EPS.get(reference.dtype, EPS["float32"])
        self._growth = _growth(self.reference, steps_of(nudged)) if nudged is not None else []
        self.rows = self._rows_read()
        self.largest = 0.0  # the largest relative difference of a gradient that counts as rounding or not
        self.step = 0  # the first step whose gradients differ; 0 if there is none
        self.groups: list[GradientGroup] = []
        if not self.held.unequal:
            self._look_at_steps()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def compares_gradients(self) -> bool:
        """Whether the gradients of one process are those that the ranks should have."""
        return not self.held.unequal and not self.held.reseeded and self.rows in ("divided", "whole", "sliced")

    def weights_apart(self) -> tuple[int, str]:
        """Returns the first step after which a weight differs between the ranks that hold it, and its name; (0, "") if none."""
        ends = [recording.of_kind("end")[-1] for recording in self.recordings]
        for number in range(1, self.num_steps + 1):
            for unit in self.held.units:
                values = []
                for rank, name in unit.holders.items():
                    steps = self.ranks[rank]
                    event = steps[number].event if number < len(steps) else ends[rank]
                    # A model that a rank has not called yet is not known yet.
                    if name in event["weights"]:
                        values.append(np.asarray(event["weights"][name]))
                if any(_norm(value - values[0]) > NEAR * _norm(values[0]) for value in values):
                    return number, unit.name
        return 0, ""

    def at(self, rank: int) -> BareStep:
        """Returns the step that differs, on a rank; the first one if none does."""
        return self.ranks[rank][max(self.step, 1) - 1]

    @property
    def one(self) -> BareStep:
        """The same step of one process."""
        return self.reference[max(self.step, 1) - 1]

    # -- samples ------------------------------------------------------------------------------------------------

    def _rows_read(self) -> Rows:
        """Says how the ranks divide the rows of one process: over all steps, where each counts."""
        kinds: Counter[Rows] = Counter()
        for number in range(self.num_steps):
            kinds[self._rows_of(number)] += 1
        for kind in ("more", "other", "sliced", "whole"):
            if kinds[kind]:
                return kind
        return "divided"

    def _rows_of(self, number: int) -> Rows:
        expected = Counter(self.reference[number].rows)
        # Ranks that read the same rows in the same order read them together, as those of tensor parallelism do.
        distinct = {tuple(steps[number].rows) for steps in self.ranks}
        union: Counter[str] = Counter()
        for rows in distinct:
            union.update(rows)
        if union == expected:
            return "whole" if len(distinct) == 1 and self.world > 1 else "divided"
        shapes = [event["shapes"] for event in self.reference[number].of_kind("forward")]
        own_shapes = [event["shapes"] for event in self.ranks[0][number].of_kind("forward")]
        if shapes and own_shapes and shapes[0] != own_shapes[0]:
            return "sliced"
        if union.total() > expected.total() and number == 0:
            return "more"
        return "other"

    # -- gradients ------------------------------------------------------------------------------------------------

    def _look_at_steps(self) -> None:
        for number in range(self.num_steps):
            groups = self._groups_of(number)
            if groups:
                self.step = number + 1
                self.groups = groups
                return

    def _limit(self, number: int) -> float:
        """Returns the largest relative difference that counts as rounding in a step."""
        if not self._growth:
            return ONSET_MARGIN * self._eps
        return GROWTH_MARGIN * max(self._eps, *self._growth[: number + 1])

    def _groups_of(self, number: int) -> list[GradientGroup]:
        one = self.reference[number]
        total = _norm(np.asarray([_norm(one.gradient(name)) for name in one.event["gradients"]]))
        limit = self._limit(number)
        judged: list[tuple[HeldUnit, Kind, dict[int, float]]] = []
        for unit in self.held.units:
            kind, factors = self._kind(number, unit, limit, total)
            judged.append((unit, kind, factors))
        different = [entry for entry in judged if entry[1] != "same"]
        if not different:
            return []
        by_rank = _one_factor_a_rank(judged, self.world)
        if by_rank:
            units = [unit for unit, _, factors in judged if factors]
            return [self._described(number, GradientGroup("scaled", units, factors=by_rank))]
        # A gradient of one number is a multiple of any other: it says nothing by itself, and goes with the others.
        weak = [entry for entry in different if _length(one.gradient(entry[0].name, entry[0].part)) == 1]
        strong = [entry for entry in different if entry not in weak]
        groups = _grouped(strong or weak)
        if strong:
            groups[0].units.extend(unit for unit, _, _ in weak)
        return [self._described(number, group) for group in groups]

    def _kind(self, number: int, unit: HeldUnit, limit: float, total: float) -> tuple[Kind, dict[int, float]]:
        """Returns the kind of a unit, and by rank the factor between its gradient and that of one process, if there is one.

        Args:
            number: of the step, from 0.
            unit: a parameter, or a part of one.
            limit: the largest relative difference that counts as rounding.
            total: the norm of all gradients of one process.
        """
        expected = self._expected(number, unit)
        known = self._known_gradients(number, unit)
        present = {rank: value for rank, value in known.items() if value is not None and value.size}
        if expected is None and not self.compares_gradients:
            return "same", {}
        small = _SMALL_PART * total
        if expected is None or _norm(expected) <= small:
            is_zero = all(_norm(value) <= max(small, limit * total) for value in present.values())
            return ("same" if is_zero else "differs"), {}
        if not known:
            return "same", {}
        if not present:
            return "none", {}
        size = _norm(expected)
        differences = [_norm(value - expected) for value in present.values()]
        self.largest = max(self.largest, *(difference / size for difference in differences))
        if len(present) < len(known):
            return "some", {}
        factors = _factors(present, expected, limit)
        if max(differences) <= limit * size:
            return "same", factors
        first = next(iter(present.values()))
        if all(_norm(value - first) <= limit * max(size, _norm(first)) for value in present.values()):
            return ("factor" if factors else "differs"), factors
        if self.rows != "divided" and _norm(sum(present.values()) - expected) <= NEAR * size:
            return "partial", {}
        if self._are_own(number, unit, present):
            return "own", {}
        return ("scaled" if factors else "differs"), factors

    def _expected(self, number: int, unit: HeldUnit) -> Vector | None:
        """Returns the gradient of one process.

        Where that is another one by right, ranks can only be compared with each other: their mean stands for one process.
        """
        if self.compares_gradients:
            return self.reference[number].gradient(unit.name, unit.part)
        of_ranks = [self.ranks[rank][number].gradient(name) for rank, name in unit.holders.items()]
        present = [value for value in of_ranks if value is not None]
        return sum(present[1:], present[0]) / len(present) if len(present) > 1 else None

    def _known_gradients(self, number: int, unit: HeldUnit) -> dict[int, Vector | None]:
        """Returns the gradient of each rank that knows the unit by its name.

        A rank that has not called the model yet does not know the name, and has recorded the gradient by its number.
        """
        known: dict[int, Vector | None] = {}
        for rank, name in unit.holders.items():
            step = self.ranks[rank][number]
            has_unnamed = any(recorded.startswith("optimizer") for recorded in step.event["gradients"])
            if name in step.event["weights"] or not has_unnamed:
                known[rank] = step.gradient(name)
        return known

    def _are_own(self, number: int, unit: HeldUnit, gradients: Mapping[int, Vector]) -> bool:
        """Returns whether the gradient of each rank is what its own backward passes gave."""
        for rank, gradient in gradients.items():
            raw = self.ranks[rank][number].raw(unit.holders[rank])
            if raw is None or _norm(gradient - raw) > NEAR * _norm(raw):
                return False
        return True

    def _described(self, number: int, group: GradientGroup) -> GradientGroup:
        """Adds to a group of what its gradients are made."""
        units = [unit for unit in group.units if len(unit.holders) == self.world]
        raws = [
            _joined([steps[number].raw(unit.holders[rank]) for unit in units]) for rank, steps in enumerate(self.ranks)
        ]
        targets = _joined([self.ranks[0][number].gradient(unit.holders[0]) for unit in units])
        expected = _joined([self.reference[number].gradient(unit.name, unit.part) for unit in units])
        return replace(
            group,
            by_rank=_solved(raws, targets),
            by_pass=self._by_pass(number, units, targets),
            reference_by_rank=_solved(raws, expected),
        )

    def _by_pass(
        self, number: int, units: Sequence[HeldUnit], targets: Vector | None
    ) -> tuple[Sequence[float], Sequence[float]] | None:
        count = len(self.ranks[0][number].passes)
        if count < 2 or any(len(steps[number].passes) != count for steps in self.ranks):
            return None
        means: list[Vector | None] = []
        own: list[Vector | None] = []
        for place in range(count):
            vectors = []
            for rank, steps in enumerate(self.ranks):
                raw = steps[number].passes[place]["raw"]
                vectors.append(_joined([raw.get(unit.holders[rank]) for unit in units]))
            known = [vector for vector in vectors if vector is not None]
            means.append(np.mean(known, axis=0) if len(known) == self.world else None)
            own.append(vectors[0])
        parts = _solved([*means, *own], targets)
        return None if parts is None else (parts[:count], parts[count:])


def _joined(parts: Sequence[Any]) -> Vector | None:
    """Returns one long vector of all parts; None if one of them is missing, or if there are none."""
    if not parts or any(part is None for part in parts):
        return None
    return np.concatenate(parts)


def _factors(gradients: Mapping[int, Vector], expected: Vector, limit: float) -> dict[int, float]:
    """Returns by rank the number by which its gradient is a multiple of the expected one; {} if one rank's is no multiple."""
    size = _norm(expected)
    factors: dict[int, float] = {}
    for rank, gradient in gradients.items():
        factor = float(gradient @ expected) / size**2
        if _norm(gradient - factor * expected) > max(limit, NEAR) * size * max(abs(factor), NEAR):
            return {}
        factors[rank] = factor
    return factors


def _one_factor_a_rank(judged: Iterable[tuple[HeldUnit, Kind, dict[int, float]]], world: int) -> dict[int, float]:
    """Returns by rank the factor of all of its gradients, if each rank has one and they are not alike; {} otherwise."""
    found: dict[int, list[float]] = {rank: [] for rank in range(world)}
    for unit, kind, factors in judged:
        if not factors and kind != "same":
            return {}
        for rank in unit.holders:
            if rank in factors:
                found[rank].append(factors[rank])
    if not all(found.values()):
        return {}
    means = {rank: float(np.median(values)) for rank, values in found.items()}
    is_one = all(
        abs(value - means[rank]) <= NEAR * abs(means[rank]) for rank, values in found.items() for value in values
    )
    differ = max(means.values()) - min(means.values()) > NEAR * max(map(abs, means.values()))
    return means if is_one and differ else {}


def _grouped(different: Sequence[tuple[HeldUnit, Kind, dict[int, float]]]) -> list[GradientGroup]:
    """Puts units of one kind, and for "factor" of one factor, into one group; the largest groups first."""
    groups: list[GradientGroup] = []
    for unit, kind, factors in different:
        factor = next(iter(factors.values())) if kind == "factor" else 1.0
        for group in groups:
            if group.kind == kind and abs(group.factor - factor) <= 2 * NEAR * abs(factor):
                group.units.append(unit)
                break
        else:
            groups.append(GradientGroup(kind, [unit], factor))
    return sorted(groups, key=lambda group: -len(group.units))


def _solved(parts: Sequence[Vector | None], target: Vector | None) -> list[float] | None:
    """Returns how much of each part adds up to the target; None if no sum of them does, or if one is not known."""
    known = [part for part in parts if part is not None]
    if target is None or len(known) < len(parts):
        return None
    matrix = np.stack(known, axis=1)
    found, *_ = np.linalg.lstsq(matrix, target, rcond=1e-6)
    if _norm(matrix @ found - target) > NEAR * _norm(target):
        return None
    return [float(value) for value in found]


def _growth(reference: Sequence[BareStep], nudged: Sequence[BareStep]) -> list[float]:
    """Returns for each step how far gradients move if initial weights are changed by one rounding."""
    grown = []
    for step, other in zip(reference, nudged, strict=False):
        total = _norm(np.asarray([_norm(step.gradient(name)) for name in step.event["gradients"]]))
        largest = 0.0
        for name in step.event["gradients"]:
            value, moved = step.gradient(name), other.gradient(name)
            if value is not None and moved is not None and _norm(value) > _SMALL_PART * total:
                largest = max(largest, _norm(moved - value) / _norm(value))
        grown.append(largest)
    return grown


def _length(vector: Vector | None) -> int:
    return 0 if vector is None else len(vector)


def _norm(vector: Any) -> float:
    return 0.0 if vector is None else float(np.linalg.norm(vector))
