"""From the values of a DeepSpeed config to settings of ours; and keys of it that fight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import Problem
from paceline.compat.cases import VALUE, Case, fits, word
from paceline.compat.deepspeed.config.keys import rows
from paceline.compat.deepspeed.config.row import Derived, Key, Staged
from paceline.compat.deepspeed.config.values import Said
from paceline.config.given import Choice, Given

_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"


_ORDERED = (
    ("autotuning.start_profile_step", "autotuning.end_profile_step"),
    ("autotuning.min_train_batch_size", "autotuning.max_train_batch_size"),
    ("autotuning.min_train_micro_batch_size_per_gpu", "autotuning.max_train_micro_batch_size_per_gpu"),
)


@dataclass
class Meaning:
    """What became of a config.

    Attributes:
        given: in our words.
        unused: keys without effect, each with the reason.
        kept: keys whose values are read as they are.
        problems: keys that ask for what is not there, and keys that fight.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    kept: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def meaning_of(said: Said) -> Meaning:
    """Applies the table, in its order: of two rows that mean the same setting the later one counts."""
    found = Meaning(problems=_fights(said))
    for row in rows():
        where = said.places.get(row.name) or (said.places.get(_switch(row)) if row.always else None)
        if where and said.values[row.name] is not None and _is_on(row, said):
            _apply(row, where, said, found)
    _join_profiles(found)
    return found


def _switch(row: Key) -> str:
    return f"{row.name.rpartition('.')[0]}.enabled"


def _is_on(row: Key, said: Said) -> bool:
    """Whether the block of a key is switched on; one without a switch is."""
    return row.name == _switch(row) or bool(said.values.get(_switch(row), True))


def _apply(row: Key, where: str, said: Said, found: Meaning) -> None:
    value = said.values[row.name]
    if row.needs and not _met(row.needs, said.values):
        found.unused.append(_unused(row, value, where, f"it counts only together with {row.needs.replace('=', ' ')}"))
        return
    case = next((each for each in row.cases if fits(each, _asked(value)) and _at_stage(each, said.values)), None)
    if case is None:
        found.kept.append(Choice(row.name, value, "code", where))
    elif case.fix:
        shown = row.name if isinstance(value, Mapping | bool) else f"{row.name} {value}"
        found.problems.append(
            Problem("deepspeed-feature", f"{shown} is not supported.", f"{where}: {case.why}", case.fix)
        )
    elif not case.means:
        found.unused.append(_unused(row, value, where, case.why))
    elif other := next((name for name in case.unless if name in said.places), None):
        found.unused.append(_unused(row, value, where, f"{other} ({said.places[other]}) says it"))
    else:
        found.given += [Given(name, _ours(ours, value), "code", where) for name, ours in case.means.items()]


def _asked(value: Any) -> Any:
    """A block asks for something unless it is switched off."""
    return value.get("enabled", True) if isinstance(value, Mapping) else value


def _at_stage(case: Case, values: Mapping[str, Any]) -> bool:
    return not isinstance(case, Staged) or str(values[_STAGE]) in case.stages


def _met(need: str, values: Mapping[str, Any]) -> bool:
    name, _, wanted = need.partition("=")
    return word(values[name]) == wanted


def _ours(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, Derived):
        return ours.of(theirs)
    return theirs if ours is VALUE else ours


def _unused(row: Key, value: Any, where: str, why: str) -> Choice:
    return Choice(row.name, value, "code", where, f"no effect here: {why}")


def _join_profiles(found: Meaning) -> None:
    """One setting holds all that is measured."""
    measured = [each for each in found.given if each.name == "profile"]
    if measured:
        found.given = [each for each in found.given if each.name != "profile"]
        names = ",".join(str(each.value) for each in measured)
        places = ", ".join(dict.fromkeys(each.where for each in measured))
        found.given.append(Given("profile", names, "code", places))


def _fights(said: Said) -> list[Problem]:
    """Pairs of keys that cannot both count."""
    values, given = said.values, said.places
    precisions = [name for name in ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled") if values[name]]
    found = []
    if len(precisions) > 1:
        found.append(_fight(precisions[0], precisions[1], "a run has one precision", "keep one of the two", said))
    for what in ("optimizer", "param"):
        older = f"{_ZERO}.cpu_offload" + ("" if what == "optimizer" else "_param")
        newer = f"{_ZERO}.offload_{what}.device"
        if older in given and newer in given:
            fix = f"keep offload_{what}, the newer one"
            found.append(_fight(older, newer, "they say the same in two ways", fix, said))
    if values["gradient_allreduce_op"] == "sum" and values[_STAGE] == 3:
        fix = "leave gradient_allreduce_op out, or take a lower stage"
        found.append(_fight("gradient_allreduce_op", _STAGE, "stage 3 averages gradients", fix, said))
    if isinstance(values[_STAGE], str | list) and not values["autotuning.enabled"]:
        found.append(_fight(_STAGE, "autotuning.enabled", "several stages are for a search", "name one stage", said))
    for least, most in _ORDERED:
        if None not in (values[least], values[most]) and values[least] > values[most]:
            why = "the first must not be larger than the second"
            found.append(_fight(least, most, why, "exchange the two numbers", said))
    return found


def _fight(first: str, second: str, why: str, fix: str, said: Said) -> Problem:
    shown = [f"{name} = {said.values[name]} ({said.places.get(name, 'the default')})" for name in (first, second)]
    return Problem("deepspeed-conflict", f"{first} and {second} fight.", [*shown, why], fix)
