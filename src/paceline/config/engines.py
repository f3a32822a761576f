"""Reads what accelerate says about its engines (FSDP, its ParallelismConfig, dynamo) as settings of ours.

--fsdp_*, fsdp_config:, FSDP_*, FullyShardedDataParallelPlugin(...)
    -> Given("fsdp_sharding_strategy", "SHARD_GRAD_OP", source, where)
    -> a case of `engine_fields.FIELDS`
    -> Given("zero", 2, source, where), or why it has no effect, or a problem
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.env import parse_bool
from paceline.base.errors import Problem, short_repr
from paceline.config.engine_fields import FIELDS, NODES, ROWS, VALUE, Case, Field
from paceline.config.given import SOURCES, Choice, Given


@dataclass
class Translation:
    """What became of a list of values.

    Attributes:
        given: in our words.
        unused: those without effect, each with the reason.
        problems: those that ask for what is not there.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def field_of(given: Given) -> Field | None:
    """The row of a value's name; None where it is none of an engine's."""
    name = given.name
    if name == "distributed_type" and word(given.value) == "fsdp":
        name = "use_fsdp"
    return FIELDS.get(name)


def knows(given: Given) -> bool:
    """Whether a value belongs to an engine that is understood."""
    return field_of(given) is not None


def from_env(env: Mapping[str, str]) -> list[Given]:
    """accelerate's variables that are set and not empty; those of FSDP where it is switched on."""
    skipped = (
        () if word(env.get("ACCELERATE_USE_FSDP", "")) in ("true", "1", "yes") else ("FSDP_", "ACCELERATE_USE_FSDP")
    )
    return [
        Given(each.name, env[each.variable], "environment", each.variable)
        for each in ROWS
        if each.variable and env.get(each.variable) and not each.variable.startswith(skipped)
    ]


def variables_of(unused: Iterable[Choice]) -> dict[str, str]:
    """Values without effect here, as accelerate's variables: plugins that a script makes show them all the same."""
    rows = {choice.field: choice for choice in unused if choice.field in FIELDS}
    return {
        FIELDS[name].variable: str(choice.value)
        for name, choice in rows.items()
        if FIELDS[name].variable.startswith("FSDP_") and choice.source != "environment"
    }


def translate(given: Iterable[Given], nodes: int) -> Translation:
    """Says the same in our words; what is no engine's passes through.

    Args:
        given: values of any source.
        nodes: hosts that take part.
    """
    found = Translation()
    said: dict[str, Given] = {}
    for each in sorted(given, key=lambda one: SOURCES.index(one.source)):
        row = field_of(each)
        if row is None:
            found.given.append(each)
        else:
            said[row.name] = Given(
                row.name, "true" if each.name == "distributed_type" else each.value, each.source, each.where
            )
    for row in ROWS:
        if row.name in said:
            _translate(row, said[row.name], said, nodes, found)
    both = [said[name] for name in ("parallelism_config_cp_size", "parallelism_config_sp_size") if name in said]
    if len([each for each in both if word(each.value) not in ("1", "none")]) > 1:
        what, fix = "cp_size and sp_size both divide sequences.", "set one of them to 1"
        found.problems.append(Problem("accelerate-feature", what, "; ".join(map(str, both)), fix))
    return found


def _translate(row: Field, given: Given, said: Mapping[str, Given], nodes: int, found: Translation) -> None:
    missing = next((need for need in row.needs if not _met(need, said)), None)
    if missing is not None:
        found.unused.append(_unused(given, f"it counts only together with {missing.replace('=', ' ')}"))
        return
    case = next((case for case in row.cases if fits(case, given.value)), None)
    if case is None:
        expected = ", ".join(each.value.replace("|", ", ") for each in row.cases)
        found.problems.append(
            Problem("config-value", f"{row.name} cannot be {short_repr(given.value)}.",
                    f"it comes from {given.where}; expected: {expected}", f"give {given.where} such a value, or leave it out")
        )  # fmt: skip
    elif case.fix:
        shown = f"{row.name} {given.value}"
        found.problems.append(
            Problem("accelerate-feature", f"{shown} is not supported.", f"{given.where}: {case.why}", case.fix)
        )
    elif case.means:
        if not any(name in said for name in case.unless):
            found.given += [
                Given(name, _value(value, given.value, nodes), given.source, given.where)
                for name, value in case.means.items()
            ]
    else:
        found.unused.append(_unused(given, case.why))


def notices(unused: Sequence[Choice]) -> tuple[str, ...]:
    """One sentence on what has no effect although somebody asked for it; nothing on values that change nothing."""
    told = [row for row in unused if row.field in FIELDS and word(row.value) not in _default_words(FIELDS[row.field])]
    if not told:
        return ()
    rows = "; ".join(f"{row.field} ({row.where}): {row.reason.removeprefix('no effect here: ')}" for row in told)
    return (f"no effect here: {rows}.",)


def fits(case: Case, value: Any) -> bool:
    """Whether a case is about a value."""
    if case.value == "*":
        return True
    words = [each.lower() for each in case.value.split("|")]
    if word(value) in words:
        return True
    try:
        return ("true" if parse_bool(word(value)) else "false") in words
    except ValueError:
        return False


def word(value: Any) -> str:
    """A value as one small word, for comparison."""
    return str(value).strip().lower()


def _value(ours: Any, theirs: Any, nodes: int) -> Any:
    if ours is NODES:
        return nodes
    if ours is VALUE:
        return theirs.strip() if isinstance(theirs, str) else theirs
    return ours


def _met(need: str, said: Mapping[str, Given]) -> bool:
    name, _, wanted = need.partition("=")
    given = said.get(name)
    return given is not None and any(
        word(given.value) == each.lower() or fits(Case(each), given.value) for each in wanted.split("|")
    )


def _unused(given: Given, why: str) -> Choice:
    return Choice(given.name, given.value, given.source, given.where, f"no effect here: {why}")


def _default_words(row: Field) -> tuple[str, ...]:
    return tuple(each.lower() for each in row.default.split("|")) if row.default else ()
