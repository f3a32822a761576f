"""Reads frozen dataclasses from JSON strictly: a missing field, a wrong type or a value out of its bounds is an error.

The types of the fields are the schema. They may be int, float, str, bool, None, `Literal`, unions, tuples, other
dataclasses, and `Annotated[..., Between(low, high)]` for numbers and for the length of texts.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

# Readers of JSON that hold numbers as float64 lose digits of larger integers.
_LARGEST = 1 << 53
# Characters of a text that has no bounds of its own. A text that names thousands of hosts is shorter.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Between:
    """Holds the bounds of a number, or of the length of a text; the bounds themselves are allowed."""

    low: float
    high: float


def read(kind: object, value: object, where: str = "") -> Any:
    """Converts what `json.loads` has returned into a value of `kind`.

    Args:
        kind: the type of a field of a dataclass.
        value: what was read from JSON.
        where: the field, for messages.

    Raises:
        ValueError: the value is not of this kind; the message names the field and does not show the value.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if is_dataclass(kind):
        return _dataclass(cast(type, kind), value, where)
    if origin is Annotated:
        return _within(read(args[0], value, where), args[1], where)
    if origin in (Union, types.UnionType):
        return _either(args, value, where)
    if origin is tuple or origin is Sequence:
        return _tuple(args, value, where)
    if origin is Literal:
        if isinstance(value, str) and value in args:
            return value
    elif kind is int and type(value) is int:  # `isinstance` would accept a bool as an int
        return _within(value, Between(-_LARGEST, _LARGEST), where)
    elif kind is float and type(value) in (int, float):
        return float(_within(value, Between(-_LARGEST, _LARGEST), where))
    elif type(value) is kind:
        return _short(value, where)
    raise ValueError(f"{where} is a {type(value).__name__}")


@cache
def hints(kind: type) -> Mapping[str, Any]:
    """Returns the types of the fields of a dataclass, including their bounds."""
    return get_type_hints(kind, include_extras=True)


def _dataclass(kind: type, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}")
    types_by_name = hints(kind)
    unknown = set(value) - set(types_by_name)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in value]
    if unknown or missing:
        # Only the number of unknown fields is shown: their names come from the sender and can be anything.
        raise ValueError(f"{where} has {len(unknown)} fields too many, and lacks {', '.join(missing) or 'none'}")
    values = {name: read(types_by_name[name], part, f"{where}.{name}") for name, part in value.items()}
    return kind(**values)


def _tuple(args: Sequence[object], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}")
    # `Sequence[T]` has one argument, `tuple[T, ...]` has an ellipsis as the second: both have any number of parts.
    if len(args) == 1 or tuple(args[1:]) == (...,):
        return tuple(read(args[0], part, where) for part in value)
    if len(value) != len(args):
        raise ValueError(f"{where} has {len(value)} parts")
    return tuple(read(kind, part, where) for kind, part in zip(args, value, strict=True))


def _either(kinds: Sequence[object], value: object, where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return read(kind, value, where)
        except ValueError as error:
            problems.append(str(error))
    # A value that may be missing is written `T | None`, so the problem with the first type says more than the last one.
    raise ValueError(problems[0])


def _within(value: object, bounds: Between, where: str) -> Any:
    size = len(value) if isinstance(value, str) else value
    if not isinstance(size, int | float) or math.isnan(size) or not bounds.low <= size <= bounds.high:
        raise ValueError(f"{where} is out of its bounds")
    return value


def _short(value: object, where: str) -> object:
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"{where} has {len(value)} characters")
    return value
