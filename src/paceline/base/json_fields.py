"""Reads frozen dataclasses from JSON, strictly: every field is there, of its type and within its bounds, or nothing is read.

The types of the fields are the schema. Understood are int, float, str, bool, None, `Literal`, unions, tuples, other
dataclasses, and `Annotated[..., Between(low, high)]` for numbers and for the length of texts.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

_LARGEST = 1 << 53  # beyond it, other readers of JSON lose digits
_LONGEST = 1 << 20  # characters of a text that has no bounds of its own: one that names thousands of hosts has fewer


@dataclass(frozen=True)
class Between:
    """The bounds of a number, or of the length of a text; both are allowed values."""

    low: float
    high: float


def read(kind: object, value: object, where: str = "") -> Any:
    """A value of `kind`, from what `json.loads` gave.

    Args:
        kind: a type as it stands in a dataclass.
        value: what was read.
        where: the field, for messages.

    Raises:
        ValueError: it is no such value; names the field, and does not show the value.
    """
    origin, args = get_origin(kind), get_args(kind)
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
    elif kind is int and type(value) is int:  # a bool is no int here
        return _within(value, Between(-_LARGEST, _LARGEST), where)
    elif kind is float and type(value) in (int, float):
        return float(_within(value, Between(-_LARGEST, _LARGEST), where))
    elif type(value) is kind:
        return _short(value, where)
    raise ValueError(f"{where} is a {type(value).__name__}")


@cache
def hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, bounds included."""
    return get_type_hints(kind, include_extras=True)


def _dataclass(kind: type, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}")
    types_by_name = hints(kind)
    strange = sorted(set(value) - set(types_by_name))
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in value]
    if strange or missing:
        raise ValueError(f"{where} has {len(strange)} fields too many, and lacks {', '.join(missing) or 'none'}")
    return kind(**{name: read(types_by_name[name], part, f"{where}.{name}") for name, part in value.items()})


def _tuple(args: Sequence[object], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}")
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
