"""Options of a strategy: fields of a frozen dataclass, each with its kind and one sentence, read and checked here.

A strategy says `Options = ShardOptions`; the docs table, `--option shard.reshard=no` and the errors follow from it.
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
        default: its value where nobody says otherwise; a mutable one is copied by `dict` or `list`.
        kind: how a single value is read; None takes any object as it is (mappings, lists, functions).
        doc: one sentence that says what it does.
    """
    metadata = {"kind": kind, "doc": doc}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def names_of(value: str | Iterable[object]) -> tuple[str, ...]:
    """The names in the value of an option that takes several: a list of them, or text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    names = [str(part).strip() for part in parts]
    # A comma at the end leaves an empty name.
    return tuple(filter(None, names))


@dataclass(frozen=True)
class NoOptions:
    """For strategies that have none."""


def read(
    cls: type[T], given: Mapping[str, Any], strategy: str, places: Mapping[str, str] | None = None
) -> tuple[T, list[Problem]]:
    """The options of `strategy`, and everything that is wrong with what was given; wrong ones keep their default.

    Args:
        cls: the dataclass of its options.
        given: values by name.
        strategy: its name.
        places: where each was said, by `options.strategy.name`.
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
    """Name, default, what is expected and what it does, for each option: for the reference page."""
    table = []
    for option in fields(cls):
        kind = option.metadata["kind"]
        expected = kind.expected if kind else "any"
        default = option.default if option.default_factory is MISSING else option.default_factory()
        table.append((option.name, default, expected, option.metadata["doc"]))
    return table
