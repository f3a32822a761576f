"""Reads frozen dataclasses from JSON: a missing field, a wrong type or a value out of its bounds is an error.

The types of the fields are the schema. They may be int, float, str, bool, None, `Literal`, unions, tuples, lists, mappings with
text as keys, other dataclasses, and `Annotated[..., Between(low, high)]` for numbers and for the length of texts.

`read` is strict: for what comes from another process. `read_file` is for files of ours that may be of another version: it
leaves out fields that it does not know, and takes numbers of any size and those that JSON lacks ("nan", "inf", "-inf").
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

# Readers of JSON that hold numbers as float64 lose digits of larger integers.
_LARGEST = 1 << 53
# Characters of a text that has no bounds of its own. A text that names thousands of hosts is shorter.
_LONGEST = 1 << 20
_NOT_FINITE = ("nan", "inf", "-inf")
# Converts one value. The text of its ValueError follows the name of the field.
_Reader = Callable[[object], Any]


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
    return _read(kind, value, where, is_strict=True)


def read_file(kind: object, value: object, where: str = "") -> Any:
    """Does what `read` does, for a file that another version may have written."""
    return _read(kind, value, where, is_strict=False)


@cache
def hints(kind: type) -> Mapping[str, Any]:
    """Returns the types of the fields of a dataclass, including their bounds."""
    types_by_name = get_type_hints(kind, include_extras=True)
    return {field.name: types_by_name[field.name] for field in fields(kind)}


def _read(kind: object, value: object, where: str, *, is_strict: bool) -> Any:
    try:
        return _reader(kind, is_strict)(value)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


@cache
def _reader(kind: Any, is_strict: bool) -> _Reader:
    """Returns what reads values of a type. It is made once, because launchers and pages read thousands of values a second."""
    origin = get_origin(kind)
    args = get_args(kind)
    if is_dataclass(kind):
        return _of_dataclass(cast(type, kind), is_strict)
    if origin is Annotated:
        return _of_bounds(_reader(args[0], is_strict), args[1])
    if origin in (Union, types.UnionType):
        return _of_union([_reader(part, is_strict) for part in args])
    if origin in (tuple, Sequence, list):
        return _of_sequence(origin, args, is_strict)
    if origin in (dict, Mapping):
        return _of_mapping(_reader(args[1], is_strict))
    if origin is Literal:
        return lambda value: value if isinstance(value, str) and value in args else _refused(value)
    if kind in (int, float):
        return _of_number(kind, is_strict)
    return _of_bounds(_exactly(kind), Between(0, _LONGEST)) if kind is str and is_strict else _exactly(kind)


def _refused(value: object) -> Any:
    raise ValueError(f" is a {type(value).__name__}")


def _exactly(kind: type) -> _Reader:
    return lambda value: value if type(value) is kind else _refused(value)


def _of_dataclass(kind: type, is_strict: bool) -> _Reader:
    readers = {name: _reader(hint, is_strict) for name, hint in hints(kind).items()}
    needed = [field.name for field in fields(kind) if MISSING is field.default is field.default_factory]

    def reader(value: object) -> Any:
        if not isinstance(value, dict):
            return _refused(value)
        unknown = value.keys() - readers.keys() if is_strict else ()
        missing = [name for name in needed if name not in value]
        if unknown or missing:
            # Only the number of unknown fields is shown: their names come from the sender and can be anything.
            raise ValueError(f" has {len(unknown)} fields too many, and lacks {', '.join(missing) or 'none'}")
        values = {}
        for name, read_part in readers.items():
            if name in value:
                try:
                    values[name] = read_part(value[name])
                except ValueError as error:
                    raise ValueError(f".{name}{error}") from None
        return kind(**values)

    return reader


def _of_sequence(origin: type, args: Sequence[Any], is_strict: bool) -> _Reader:
    # `Sequence[T]` has one argument, `tuple[T, ...]` has an ellipsis as the second: both have any number of parts.
    is_of_any_length = len(args) == 1 or tuple(args[1:]) == (...,)
    result = list if origin is list else tuple
    readers = [_reader(part, is_strict) for part in args if part is not ...]

    def reader(value: object) -> Any:
        if not isinstance(value, list):
            return _refused(value)
        if is_of_any_length:
            return result(readers[0](part) for part in value)
        if len(value) != len(readers):
            raise ValueError(f" has {len(value)} parts")
        return result(read_part(part) for read_part, part in zip(readers, value, strict=True))

    return reader


def _of_mapping(read_part: _Reader) -> _Reader:
    def reader(value: object) -> Any:
        if not isinstance(value, dict):
            return _refused(value)
        return {name: read_part(part) for name, part in value.items()}

    return reader


def _of_union(readers: Sequence[_Reader]) -> _Reader:
    def reader(value: object) -> Any:
        problems = []
        for read_part in readers:
            try:
                return read_part(value)
            except ValueError as error:
                problems.append(error)
        # A value that may be missing is written `T | None`, so the problem with the first type says more than the last one.
        raise problems[0]

    return reader


def _of_number(kind: type, is_strict: bool) -> _Reader:
    bounds = Between(-_LARGEST, _LARGEST) if is_strict else Between(-math.inf, math.inf)

    def reader(value: Any) -> Any:
        # `isinstance` would accept a bool as an int.
        is_number = type(value) is int or (kind is float and type(value) is float)
        if not is_number:
            is_other = kind is float and not is_strict and isinstance(value, str) and value in _NOT_FINITE
            return float(value) if is_other else _refused(value)
        if not bounds.low <= value <= bounds.high:  # false for NaN too
            raise ValueError(" is out of its bounds")
        return kind(value)

    return reader


def _of_bounds(read_part: _Reader, bounds: Between) -> _Reader:
    def reader(value: object) -> Any:
        part = read_part(value)
        size = len(part) if isinstance(part, str) else part
        if not bounds.low <= size <= bounds.high:
            raise ValueError(" is out of its bounds")
        return part

    return reader
