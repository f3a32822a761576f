"""Reads and checks the options of strategies: fields of a frozen dataclass, each with a kind and a sentence.

A strategy has a class attribute `Options = ShardOptions`. From it come the table in the docs, the flag
`--option shard.reshard=no`, and the errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from paceline.base.errors import Problem, short_repr
from paceline.config.kinds import Kind

T = TypeVar("T")


def option(default: Any, kind: Kind | None, doc: str) -> Any:
    """Declares one option.

    Args:
        default: its default value; a dict or a list is copied for each instance.
        kind: how a value is read; None accepts any object unchanged (mappings, lists, functions).
        doc: one sentence that says what the option does.
    """
    metadata = {"kind": kind, "doc": doc}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def names_of(value: str | Iterable[object]) -> tuple[str, ...]:
    """Returns the names in the value of an option that takes several, as a list or as text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    names = [str(part).strip() for part in parts]
    # A comma at the end leaves an empty name.
    return tuple(filter(None, names))


@dataclass(frozen=True)
class NoOptions:
    """The options of strategies that have none."""


def read(
    cls: type[T], given: Mapping[str, Any], strategy: str, places: Mapping[str, str] | None = None
) -> tuple[T, list[Problem]]:
    """Returns the options of a strategy, and a problem for each wrong value, in whose place the default is used.

    Args:
        cls: the dataclass of the options.
        given: the given values by name.
        strategy: the name of the strategy.
        places: the source of each value, by `options.STRATEGY.NAME`.
    """
    options = {option.name: option for option in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        place = (places or {}).get(f"options.{strategy}.{name}", "")
        origin = f"it comes from {place}; " if place else ""
        if name not in options:
            close = get_close_matches(name, options, 1)
            fix = f"write {close[0]!r}" if close else "use one of these, or leave it out"
            problems.append(
                Problem(
                    "strategy-option",
                    f"{strategy} has no option called {name!r}.",
                    why=f"{origin}options: {', '.join(options) or 'none'}",
                    fix=fix,
                )
            )
            continue
        kind = options[name].metadata["kind"]
        default = options[name].default
        # None is a value only of those options that have it by default: there it means "not set".
        if kind is None or (value is None and default is None):
            values[name] = value
            continue
        try:
            values[name] = kind.read(value)
        except ValueError as error:
            otherwise = "" if default is MISSING else f", or leave it out (then {default})"
            problems.append(
                Problem(
                    "strategy-value",
                    f"{strategy}.{name} cannot be {short_repr(value)}.",
                    why=f"{origin}expected: {error}",
                    fix=f"give it such a value{otherwise}",
                )
            )
    return cls(**values), problems


def rows(cls: type) -> list[tuple[str, Any, str, str]]:
    """Returns name, default, expected values and sentence of each option, for the reference page."""
    table = []
    for option in fields(cls):
        kind = option.metadata["kind"]
        expected = kind.expected if kind else "any"
        default = option.default if option.default_factory is MISSING else option.default_factory()
        table.append((option.name, default, expected, option.metadata["doc"]))
    return table
