"""From the values of a DeepSpeed config to settings of ours; and keys of it that fight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import Problem
from paceline.compat.cases import VALUE, fits, word
from paceline.compat.deepspeed.config.keys import rows
from paceline.compat.deepspeed.config.row import Derived, Key, Staged
from paceline.compat.deepspeed.config.values import Said
from paceline.config.dialects import Translation
from paceline.config.given import Choice, Given

_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"


_ORDERED = (
    ("autotuning.start_profile_step", "autotuning.end_profile_step"),
    ("autotuning.min_train_batch_size", "autotuning.max_train_batch_size"),
    ("autotuning.min_train_micro_batch_size_per_gpu", "autotuning.max_train_micro_batch_size_per_gpu"),
)


@dataclass
class Meaning(Translation):
    """What became of a config.

    Attributes:
        kept: keys whose values are read as they are.
    """

    kept: list[Choice] = field(default_factory=list)


def meaning_of(config_values: Said) -> Meaning:
    """Applies the table, in its order: of two rows that mean the same setting the later one counts."""
    meaning = Meaning(problems=_conflicts(config_values))
    for row in rows():
        switch = f"{row.name.rpartition('.')[0]}.enabled"
        is_on = row.name == switch or bool(config_values.values.get(switch, True))  # a block without a switch is on
        where = config_values.places.get(row.name)
        if where is None and row.always:
            where = config_values.places.get(switch)
        if where and is_on and config_values.values[row.name] is not None:
            _apply(row, where, config_values, meaning)

    # One setting holds all that is measured.
    measured = [given for given in meaning.given if given.name == "profile"]
    if measured:
        meaning.given = [given for given in meaning.given if given.name != "profile"]
        names = ",".join(str(given.value) for given in measured)
        places = dict.fromkeys(given.where for given in measured)
        meaning.given.append(Given("profile", names, "code", ", ".join(places)))
    return meaning


def _apply(row: Key, where: str, given: Said, meaning: Meaning) -> None:
    value = given.values[row.name]
    needed, _, wanted = row.needs.partition("=")
    if needed and word(given.values[needed]) != wanted:
        why = f"it counts only together with {needed} {wanted}"
        meaning.unused.append(_unused(row, value, where, why))
        return
    # A block asks for something unless it is switched off.
    asked = value.get("enabled", True) if isinstance(value, Mapping) else value
    stage = str(given.values[_STAGE])
    at_stage = [case for case in row.cases if not isinstance(case, Staged) or stage in case.stages]
    case = next((case for case in at_stage if fits(case, asked)), None)
    if case is None:
        meaning.kept.append(Choice(row.name, value, "code", where))
        return
    says_it = next((name for name in case.unless if name in given.places), None)
    if case.fix:
        shown = row.name if isinstance(value, Mapping | bool) else f"{row.name} {value}"
        what = f"{shown} is not supported."
        meaning.problems.append(Problem("deepspeed-feature", what, f"{where}: {case.why}", case.fix))
    elif not case.means:
        meaning.unused.append(_unused(row, value, where, case.why))
    elif says_it:
        meaning.unused.append(_unused(row, value, where, f"{says_it} ({given.places[says_it]}) says it"))
    else:
        for name, ours in case.means.items():
            if isinstance(ours, Derived):
                ours = ours.of(value)
            elif ours is VALUE:
                ours = value
            meaning.given.append(Given(name, ours, "code", where))


def _unused(row: Key, value: Any, where: str, why: str) -> Choice:
    return Choice(row.name, value, "code", where, f"no effect here: {why}")


def _conflicts(given: Said) -> list[Problem]:
    """Pairs of keys that cannot both count."""
    values = given.values
    problems: list[Problem] = []

    def add(first: str, second: str, why: str, fix: str) -> None:
        shown = [f"{name} = {values[name]} ({given.places.get(name, 'the default')})" for name in (first, second)]
        problems.append(Problem("deepspeed-conflict", f"{first} and {second} fight.", [*shown, why], fix))

    precisions = [name for name in ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled") if values[name]]
    if len(precisions) > 1:
        add(precisions[0], precisions[1], "a run has one precision", "keep one of the two")
    for older, newer in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        old_key = f"{_ZERO}.{older}"
        new_key = f"{_ZERO}.{newer}.device"
        if old_key in given.places and new_key in given.places:
            add(old_key, new_key, "they say the same in two ways", f"keep {newer}, the newer one")
    if values["gradient_allreduce_op"] == "sum" and values[_STAGE] == 3:
        fix = "leave gradient_allreduce_op out, or take a lower stage"
        add("gradient_allreduce_op", _STAGE, "stage 3 averages gradients", fix)
    if isinstance(values[_STAGE], str | list) and not values["autotuning.enabled"]:
        add(_STAGE, "autotuning.enabled", "several stages are for a search", "name one stage")
    for least, most in _ORDERED:
        if None not in (values[least], values[most]) and values[least] > values[most]:
            add(least, most, "the first must not be larger than the second", "exchange the two numbers")
    return problems
