"""From the values of a DeepSpeed config to settings of ours; and keys of it that fight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.base.errors import Problem
from paceline.config.dialects import Translation
from paceline.config.given import Choice, Given
from paceline_deepspeed.config.keys import rows
from paceline_deepspeed.config.row import Derived, Key, Staged
from paceline_deepspeed.config.text import plain
from paceline_deepspeed.config.values import ConfigValues
from paceline_doors.cases import VALUE, Case, fits, word

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


def meaning_of(config: ConfigValues) -> Meaning:
    """Applies the table, in its order: of two rows that mean the same setting the later one counts."""
    meaning = Meaning(problems=_conflicts(config))
    for row in rows():
        block = row.name.rpartition(".")[0]
        switch = f"{block}.enabled"
        is_on = row.name == switch or bool(config.values.get(switch, True))  # a block without a switch is on
        where = config.places.get(row.name)
        if where is None and row.always:
            where = config.places.get(switch)
        if where and is_on and config.values[row.name] is not None:
            _apply(row, where, config, meaning)
    for entry in config.foreign:
        why = "DeepSpeed has no such key; the script may read it"
        meaning.unused.append(Choice(entry.name, plain(entry.value), "code", entry.where, f"no effect here: {why}"))
    _join_profiles(meaning)
    _join_offloads(meaning)
    return meaning


def _join_offloads(meaning: Meaning) -> None:
    """Makes one setting of the two blocks of offload: where one of them names a disk, what is offloaded is there."""
    offloads = [given for given in meaning.given if given.name == "offload"]
    # The folder that is named last counts, as the later of two rows does.
    folders = [given.value.partition("=disk:")[2] for given in offloads if "=disk:" in given.value]
    if not folders:
        return
    what = "all" if any(given.value.startswith("all") for given in offloads) else "optimizer"
    others = [given for given in meaning.given if given.name != "offload"]
    meaning.given = [*others, Given("offload", f"{what}=disk:{folders[-1]}", "code", offloads[-1].where)]


def _join_profiles(meaning: Meaning) -> None:
    """Makes one setting of all that is measured: each block of the config that measures names its own kind of profile."""
    profiles: list[Given] = []
    others: list[Given] = []
    for given in meaning.given:
        (profiles if given.name == "profile" else others).append(given)
    if profiles:
        names = ",".join(str(given.value) for given in profiles)
        places = dict.fromkeys(given.where for given in profiles)
        meaning.given = [*others, Given("profile", names, "code", ", ".join(places))]


def _apply(row: Key, where: str, config: ConfigValues, meaning: Meaning) -> None:
    """Notes what becomes of one key that was given: settings, a reason why it has no effect, or a problem."""
    value = config.values[row.name]
    needed_name, _, needed_value = row.needs.partition("=")
    if needed_name and word(config.values[needed_name]) != needed_value:
        why = f"it counts only together with {needed_name} {needed_value}"
        meaning.unused.append(_unused(row, value, where, why))
        return
    case = _case_of(row, value, str(config.values[_STAGE]))
    if case is None:
        meaning.kept.append(Choice(row.name, value, "code", where))
        return
    stronger_names = [name for name in case.unless if name in config.places]
    if case.fix:
        shown = row.name if isinstance(value, Mapping | bool) else f"{row.name} {value}"
        what = f"{shown} is not supported."
        meaning.problems.append(Problem("deepspeed-feature", what, f"{where}: {case.why}", case.fix))
    elif not case.means:
        meaning.unused.append(_unused(row, value, where, case.why))
    elif stronger_names:
        name = stronger_names[0]
        meaning.unused.append(_unused(row, value, where, f"{name} ({config.places[name]}) says it"))
    else:
        for name, ours in case.means.items():
            if isinstance(ours, Derived):
                ours = ours.of(value)
            elif ours is VALUE:
                ours = value
            meaning.given.append(Given(name, ours, "code", where))


def _case_of(row: Key, value: object, stage: str) -> Case | None:
    """Finds the case of the table for a value; None where the engine reads the value itself."""
    if isinstance(value, Mapping):
        value = value.get("enabled", True)  # a block asks for something unless it is switched off
    for case in row.cases:
        counts_here = not isinstance(case, Staged) or stage in case.stages
        if counts_here and fits(case, value):
            return case
    return None


def _unused(row: Key, value: object, where: str, why: str) -> Choice:
    return Choice(row.name, value, "code", where, f"no effect here: {why}")


def _conflicts(config: ConfigValues) -> list[Problem]:
    """Pairs of keys that cannot both count."""
    values = config.values
    problems: list[Problem] = []

    def add(first: str, second: str, why: str, fix: str) -> None:
        reasons = []
        for name in (first, second):
            reasons.append(f"{name} = {values[name]} ({config.places.get(name, 'the default')})")
        problems.append(Problem("deepspeed-conflict", f"{first} and {second} fight.", [*reasons, why], fix))

    halves = [name for name in ("fp16", "bf16") if values[f"{name}.enabled"]]
    if len(halves) > 1:
        add("fp16.enabled", "bf16.enabled", "a run has one precision", "keep one of the two")
    elif halves and values["torch_autocast.enabled"] and values["torch_autocast.dtype"] != halves[0]:
        # With equal dtypes, both say what is done here in any case: arithmetic under autocast, beside float32 masters.
        fix = f'let both have one dtype: torch_autocast.dtype = "{halves[0]}"'
        add(f"{halves[0]}.enabled", "torch_autocast.dtype", "a run has one precision", fix)
    for older, newer in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        old_key = f"{_ZERO}.{older}"
        new_key = f"{_ZERO}.{newer}.device"
        if old_key in config.places and new_key in config.places:
            add(old_key, new_key, "they say the same in two ways", f"keep {newer}, the newer one")
    for block, stages in ((f"{_ZERO}.offload_optimizer", (1, 2, 3)), (f"{_ZERO}.offload_param", (3,))):
        has_folder = values[f"{block}.nvme_path"] not in (None, "", "none")
        if values[f"{block}.device"] == "nvme" and values[_STAGE] in stages and not has_folder:
            add(f"{block}.device", f"{block}.nvme_path", "what is on a disk is in a folder", "give nvme_path a folder")
    if values["gradient_allreduce_op"] == "sum" and values[_STAGE] == 3:
        fix = "leave gradient_allreduce_op out, or take a lower stage"
        add("gradient_allreduce_op", _STAGE, "stage 3 averages gradients", fix)
    if isinstance(values[_STAGE], str | list) and not values["autotuning.enabled"]:
        add(_STAGE, "autotuning.enabled", "several stages are for a search", "name one stage")
    for least, most in _ORDERED:
        if None not in (values[least], values[most]) and values[least] > values[most]:
            add(least, most, "the first must not be larger than the second", "exchange the two numbers")
    return problems
