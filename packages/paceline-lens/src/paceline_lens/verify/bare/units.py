"""Which tensor of one process, or which part of one, each rank holds. Pure.

Ranks may hold whole parameters (data parallel), parts (tensor parallel, FSDP2), or parameters that one process has under
another name (experts: a rank's `experts.0` is another rank's `experts.2` of one process). A DTensor says what it is.
Everything else is found by the initial weights: a rank's tensor is that part of that tensor of one process that has the same
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline_lens.verify.recording import Recording

Sketches = Mapping[str, Sequence[float]]  # of a tensor under "", and of its parts under "dim:number:index"

_EQUAL = 1e-5  # the nudged run and different kernels move initial weights by a few roundings; other seeds by everything


@dataclass(frozen=True)
class HeldUnit:
    """A parameter of one process, or a part of it, and who holds it.

    Attributes:
        name: its name on one process.
        part: "" for the whole, or "dim:number:index".
        module: the class of the module that owns it.
        holders: the rank -> the name there.
    """

    name: str
    part: str
    module: str
    holders: Mapping[int, str]


@dataclass
class HeldUnits:
    """What ranks hold.

    Attributes:
        units: what could be found.
        unknown: the names of parameters of ranks that are nothing of one process.
        reseeded: names of parameters that begin with other values than on one process, alike on all ranks.
        unequal: names of parameters that begin with other values on some ranks.
    """

    units: list[HeldUnit] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    reseeded: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)


class _InitialWeights:
    """The parameters of one process's models: their descriptions, and sketches of their initial values."""

    def __init__(self, recording: Recording) -> None:
        self.described: dict[str, Any] = {}
        self.initial: dict[str, Sketches] = {}
        for event in recording.of_kind("model"):
            self.described |= event["parameters"]
            self.initial |= event["weights"]

    def shape(self, name: str, part: str) -> list[int]:
        shape = list(self.described[name]["shape"])
        if part:
            dim, number, index = map(int, part.split(":"))
            length = -(-shape[dim] // number)  # as `torch.chunk` divides: the last parts may be shorter
            shape[dim] = max(0, min(length, shape[dim] - index * length))
        return shape


def held_units(reference: Recording, ranks: Sequence[Recording]) -> HeldUnits:
    """Finds what each rank holds."""
    whole = _InitialWeights(reference)
    result = HeldUnits()
    holders: dict[tuple[str, str], dict[int, str]] = {}
    for recording in ranks:
        own = _InitialWeights(recording)
        found = _found(whole, own, recording.rank, len(ranks))
        for name in own.described:
            if name in found:
                holders.setdefault(found[name], {})[recording.rank] = name
            elif name not in result.unknown:
                result.unknown.append(name)
    for (name, part), names in holders.items():
        result.units.append(HeldUnit(name, part, whole.described[name]["module"], names))
        _note_values(result, whole.initial[name].get(part), name, [ranks[r].of_kind("model") for r in names], names)
    return result


def _note_values(
    result: HeldUnits, expected: Sequence[float] | None, name: str, models: Sequence[Any], names: Mapping[int, str]
) -> None:
    """Notes a parameter whose initial values are not those of one process, or not the same on all of its ranks."""
    values = []
    for events, own_name in zip(models, names.values(), strict=True):
        known = [event for event in events if not event["is_late"] and own_name in event["weights"]]
        values += [event["weights"][own_name][""] for event in known]
    if not values:
        return
    if not all(_equal(value, values[0]) for value in values):
        result.unequal.append(name)
    elif expected is not None and not _equal(values[0], expected):
        result.reseeded.append(name)


def _found(whole: _InitialWeights, own: _InitialWeights, rank: int, world: int) -> dict[str, tuple[str, str]]:
    """Returns the parameter and part of one process for each parameter of a rank."""
    found: dict[str, tuple[str, str]] = {}
    modules: dict[
        str, tuple[str, str]
    ] = {}  # a module's name on this rank -> on one process, and the part of its tensors
    late: list[str] = []
    for name, description in own.described.items():
        place = description["place"]
        values = own.initial[name][""]
        if place is not None:
            if name in whole.described:
                found[name] = (name, ":".join(map(str, place)))
        elif _is_constant(values):
            # Zeros and ones are everywhere: their neighbours say whose they are.
            late.append(name)
        else:
            match = _by_values(whole, own, name, rank)
            if match is not None:
                found[name] = match
                modules[_module_of(name)] = (_module_of(match[0]), match[1])
            elif name in whole.described and description["shape"] == whole.shape(name, ""):
                found[name] = (name, "")  # other values, which are noted later
    for name in late:
        match = _by_module(whole, own, name, modules, rank)
        if match is not None:
            found[name] = match
    return found


def _by_values(whole: _InitialWeights, own: _InitialWeights, name: str, rank: int) -> tuple[str, str] | None:
    """Finds a tensor with the same values: under the same name first, then under another one with the same last word."""
    shape = own.described[name]["shape"]
    values = own.initial[name][""]
    last = name.rpartition(".")[2]
    others = [other for other in whole.described if other != name and other.rpartition(".")[2] == last]
    for other in [name, *others] if name in whole.described else others:
        for part in _parts(whole, other, rank):
            if whole.shape(other, part) == shape and _equal(whole.initial[other][part], values):
                return other, part
    return None


def _by_module(
    whole: _InitialWeights, own: _InitialWeights, name: str, modules: Mapping[str, tuple[str, str]], rank: int
) -> tuple[str, str] | None:
    """Finds a tensor of constant values: in the module in which its neighbours were found."""
    shape = own.described[name]["shape"]
    module, part = modules.get(_module_of(name), (_module_of(name), ""))
    last = name.rpartition(".")[2]
    other = f"{module}.{last}" if module else last
    if other not in whole.described:
        return None
    if whole.shape(other, "") == shape:
        return other, ""
    index = int(part.split(":")[2]) if part else None
    for candidate in _parts(whole, other, rank):
        fits = index is None or not candidate or int(candidate.split(":")[2]) == index
        if fits and whole.shape(other, candidate) == shape:
            return other, candidate
    return None


def _parts(whole: _InitialWeights, name: str, rank: int) -> Iterator[str]:
    """Yields the parts of a tensor, the whole first and then this rank's own: the order of ranks is the likely one."""
    parts = list(whole.initial[name])
    yield from sorted(
        parts, key=lambda part: bool(part) and 1 + (int(part.split(":")[2]) != rank % int(part.split(":")[1]))
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_constant(values: Sequence[float]) -> bool:
    """Returns whether a sketch may be that of a tensor of equal values, such as zeros or ones."""
    sizes = np.abs(np.asarray(values))
    if not sizes.any():
        return True
    whole_numbers = np.round(sizes) == sizes
    return bool(whole_numbers.all())


def _equal(values: Sequence[float], others: Sequence[float]) -> bool:
    if len(values) != len(others):
        return False
    distance = float(np.linalg.norm(np.subtract(values, others)))
    size = float(np.linalg.norm(others))
    return distance <= _EQUAL * max(size, 1e-12)
