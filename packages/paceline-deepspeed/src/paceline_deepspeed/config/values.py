"""From the keys of a DeepSpeed config to values: names checked, kinds read, "auto" resolved, defaults filled in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import Problem, short_repr
from paceline.config.given import nearest
from paceline_deepspeed.config.keys import blocks, by_name, rows
from paceline_deepspeed.config.parts import PARTS, Param, Part, part
from paceline_deepspeed.config.row import Key
from paceline_deepspeed.config.text import JsonBlock, JsonEntry, plain

_OLD_BLOCKS = {"bfloat16": "bf16"}
# Blocks whose other keys DeepSpeed does not look at; the whole config is "".
_OPEN_BLOCKS = ("", "activation_checkpointing.", "checkpoint.", "flops_profiler.", "pipeline.")
_MOST_FOREIGN = 50  # a file with more keys of another kind is no config of DeepSpeed's
_SHORT_BLOCKS = {"zero_optimization": "stage"}  # `zero_optimization: true` is stage 1


@dataclass
class ConfigValues:
    """What a config says.

    Attributes:
        values: every known key by dotted name, defaults included.
        places: where each that was given stands.
        problems: all that is wrong with names and values.
        foreign: keys that resemble none of DeepSpeed's, where it does not look at them; a script may keep some of its own
            beside DeepSpeed's.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    foreign: list[JsonEntry] = field(default_factory=list)


def values_of(block: JsonBlock, hints: Mapping[str, Any]) -> ConfigValues:
    """Reads all keys.

    Args:
        block: the whole config.
        hints: what "auto" stands for, by dotted name or by TrainingArguments' name.
    """
    config = ConfigValues({row.name: copy.copy(row.default) for row in rows()})
    _walk(block, "", hints, config)
    if len(config.foreign) > _MOST_FOREIGN:
        config.problems += [_unknown(entry, "") for entry in config.foreign]
    for role in PARTS:
        _read_part(role, hints, config)
    return config


def _walk(block: JsonBlock, above: str, hints: Mapping[str, Any], config: ConfigValues) -> None:
    """Reads the keys of a block, and of the blocks inside it.

    Args:
        above: dotted name of the block with a dot at its end; "" is the whole config.
    """
    for entry in block:
        name = above + entry.name
        if not above:
            name = _OLD_BLOCKS.get(name, name)
        if "." in entry.name:
            config.problems.append(_unknown(entry, above))
        elif name in by_name():
            _read_key(by_name()[name], entry, hints, config)
        elif name not in blocks():
            if above in _OPEN_BLOCKS and _is_foreign(entry.name, above):
                config.foreign.append(entry)
            else:
                config.problems.append(_unknown(entry, above))
        elif isinstance(entry.value, JsonBlock):
            _walk(entry.value, f"{name}.", hints, config)
        elif name in _SHORT_BLOCKS and isinstance(entry.value, bool):
            short = f"{name}.{_SHORT_BLOCKS[name]}"
            _read_key(by_name()[short], entry, hints, config)
        elif entry.value is not None and not _is_auto(entry.value):
            config.problems.append(wrong_value(name, entry.value, entry.where, "a block of keys"))


def _read_key(row: Key, entry: JsonEntry, hints: Mapping[str, Any], config: ConfigValues) -> None:
    if row.name in config.places:
        what = f"{entry.where} sets {row.name} a second time."
        config.problems.append(
            Problem("config-twice", what, f"first: {config.places[row.name]}", "keep one of the two")
        )
        return
    config.places[row.name] = entry.where
    value = plain(entry.value)
    if _is_auto(value) and row.default != "auto":
        value = _hint(row.name, row.hint, hints)
        if value is None and row.required:
            config.problems.append(_no_default(row.name, entry.where))
    if value is None:
        return
    try:
        config.values[row.name] = row.kind.read(value)
    except ValueError as error:
        config.problems.append(wrong_value(row.name, value, entry.where, str(error), row.default))


def _read_part(role: str, hints: Mapping[str, Any], config: ConfigValues) -> None:
    """Reads the parameters of the optimizer or the scheduler by the rules of its type."""
    name = config.values[f"{role}.type"]
    params = config.values[f"{role}.params"]
    where = config.places.get(f"{role}.params", "")
    place = config.places.get(f"{role}.type", "")
    if name is None:
        if params:
            what = f"{role}.params ({where}) are given without a type."
            fix = f'say which {role}: "type": "{PARTS[role][0].name}"'
            config.problems.append(Problem("config-value", what, "", fix))
        return
    kind = part(role, name)
    if kind is None:
        close = nearest(name, [choice.name for choice in PARTS[role]])
        supported = [choice.name for choice in PARTS[role] if not choice.why]
        what = f"{role}.type cannot be {short_repr(name)}."
        why = f"it comes from {place}; there are: {', '.join(supported)}"
        fix = f"write {close!r}" if close else f"use one of these, or hand `initialize` the {role} itself"
        config.problems.append(Problem("config-value", what, why, fix))
    elif kind.why:
        what = f"{role}.type {kind.name} is not supported."
        config.problems.append(Problem("deepspeed-feature", what, f"{place}: {kind.why}", kind.fix))
    elif kind.params is None:
        config.values[f"{role}.params"] = _of_torch(role, params, hints)
    else:
        config.values[f"{role}.params"] = _params(role, kind, params, where, hints, config)


def _of_torch(role: str, params: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Reads parameters of a class of torch's; an "auto" without a hint is left to torch's default."""
    read = {}
    for name, value in params.items():
        if _is_auto(value):
            arguments_name = "learning_rate" if name == "lr" else name
            value = _hint(f"{role}.params.{name}", arguments_name, hints)
            if value is None:
                continue
        read[name] = value
    return read


def _params(
    role: str, kind: Part, params: Mapping[str, Any], where: str, hints: Mapping[str, Any], config: ConfigValues
) -> dict[str, Any]:
    """Reads and checks the parameters of a type that is built here."""
    read: dict[str, Any] = {}
    rows: Mapping[str, Param] = kind.params or {}
    for name, given in params.items():
        full_name = f"{role}.params.{name}"
        row = rows.get(name)
        if row is None:
            close = nearest(name, rows)
            taken = [parameter for parameter, other in rows.items() if not other.why]
            what = f"{where}: {kind.name} has no parameter {name!r}."
            fix = f"write {close!r}" if close else "leave it out"
            config.problems.append(Problem("config-key", what, f"it takes: {', '.join(taken)}", fix))
        elif row.why:
            what = f"{full_name} is not supported."
            config.problems.append(Problem("deepspeed-feature", what, f"{where}: {row.why}", row.fix))
        else:
            value = _hint(full_name, row.hint, hints) if _is_auto(given) else given
            if value is not None:
                try:
                    read[name] = row.kind.read(value)
                except ValueError as error:
                    config.problems.append(wrong_value(full_name, value, where, str(error), row.default))
            elif _is_auto(given) and row.required:
                config.problems.append(_no_default(full_name, where))
            elif given is None and row.default is None:
                read[name] = None
    for name, row in rows.items():
        if row.required and name not in params:
            what = f"{role}.params lacks {name}, which {kind.name} needs."
            why = f"{kind.name} stands in {config.places[f'{role}.type']}"
            config.problems.append(Problem("config-value", what, why, f'say it: "{name}": ...'))
    return read


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.lower() == "auto"


def _hint(name: str, arguments_name: str, hints: Mapping[str, Any]) -> Any:
    """Returns what "auto" stands for, by the key's dotted name or by its name in TrainingArguments; None without a hint."""
    # TrainingArguments has the two betas in two fields.
    if arguments_name == "adam_betas" and {"adam_beta1", "adam_beta2"} <= hints.keys():
        return [hints["adam_beta1"], hints["adam_beta2"]]
    if name in hints:
        return hints[name]
    return hints.get(arguments_name) if arguments_name else None


def _no_default(name: str, where: str) -> Problem:
    return Problem(
        "deepspeed-auto", f"{name} is auto, and nobody said what that is.", f"it comes from {where}; there is no default",
        f"give {name} a value",
    )  # fmt: skip


def _is_foreign(name: str, above: str) -> bool:
    """Returns whether a key is none of DeepSpeed's: it resembles none of its block, and no other block has it."""
    here = {row_name.removeprefix(above).partition(".")[0] for row_name in by_name() if row_name.startswith(above)}
    anywhere = {row_name.rpartition(".")[2] for row_name in by_name()}
    return name not in anywhere and not nearest(name, here)


def _unknown(entry: JsonEntry, above: str) -> Problem:
    block = above.rstrip(".")
    what = f"{entry.where}: DeepSpeed has no key {short_repr(entry.name)}."
    if block:
        what = f"{entry.where}: DeepSpeed has no key {short_repr(entry.name)} in {block}."
    if "." in entry.name:
        return Problem("config-key", what, "", f"write blocks inside of each other: {_as_blocks(entry.name)}")
    keys_of_block: set[str] = set()
    for name in by_name():
        # The same key in another block, such as `fp16.loss_scale` for a `loss_scale` outside of all blocks.
        if name.rpartition(".")[2] == entry.name:
            return Problem("config-key", what, "", f"it is {name}: move it")
        if name.startswith(above):
            keys_of_block.add(name.removeprefix(above).partition(".")[0])
    fix = "leave it out; the reference lists all keys"
    close = nearest(entry.name, keys_of_block)
    if close:
        fix = f"write {close!r}"
    return Problem("config-key", what, "", fix)


def _as_blocks(name: str) -> str:
    text = "..."
    for part_of_name in reversed(name.split(".")):
        text = f'{{"{part_of_name}": {text}}}'
    return text


def wrong_value(name: str, value: object, where: str, expected: str, default: object = None) -> Problem:
    """Returns the problem of a value that its key cannot have."""
    what = "a block of keys" if isinstance(value, Mapping | JsonBlock) else short_repr(value)
    fix = "give it such a value, or leave it out"
    if default not in (None, {}, []):
        fix += f" (then {default})"
    return Problem("config-value", f"{name} cannot be {what}.", f"it comes from {where}; expected: {expected}", fix)
