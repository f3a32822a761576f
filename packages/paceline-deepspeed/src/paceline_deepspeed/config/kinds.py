"""Kinds of values that stand in a DeepSpeed config: wider than a setting's, since a JSON value is no text.

5e8 is a whole number, and so is "5e8"; true may be written "true"; capital letters of a word do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from paceline.config.kinds import YES_NO, Kind


@dataclass(frozen=True)
class Structure(Kind):
    """A kind that takes lists and blocks too, as they are.

    Attributes:
        check: value -> value; raises ValueError for one of another kind.
    """

    check: Callable[[Any], Any] = lambda value: value

    def read(self, value: object) -> Any:
        """Checks a value.

        Raises:
            ValueError: holding `expected`.
        """
        try:
            return self.check(value)
        except (ValueError, TypeError):
            raise ValueError(self.expected) from None


def count(minimum: int = 0, maximum: int | None = None) -> Kind:
    """Returns the kind of a whole number, which may be written 5e8."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            rounded = float(text)
            if not isfinite(rounded) or rounded != int(rounded):
                raise
            number = int(rounded)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(text)
        return number

    bound = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(f"a whole number {bound}", parse)


def _interval(text: str) -> float:
    return inf if text.lower() in ("inf", "infinity") else count(1).read(text)


def number(minimum: float | None = 0.0, maximum: float | None = None) -> Kind:
    """Returns the kind of a number; `minimum=None` takes negative ones."""

    def parse(text: str) -> float:
        value = float(text)
        too_small = minimum is not None and value < minimum
        too_large = maximum is not None and value > maximum
        if not isfinite(value) or too_small or too_large:
            raise ValueError(text)
        return value

    bound = "" if minimum is None else f" of at least {minimum:g}"
    if maximum is not None:
        bound += f" and at most {maximum:g}"
    return Kind(f"a number{bound}", parse)


def word(*words: str, **others: str) -> Kind:
    """Returns the kind of one of `words`, read into this spelling; `others` are more ways to write some of them."""
    spellings = {spelling.lower(): spelling for spelling in words} | others

    def parse(text: str) -> str:
        try:
            return spellings[text.lower().removeprefix("torch.")]
        except KeyError:
            raise ValueError(text) from None

    expected = words[0]
    if len(words) > 1:
        expected = f"{', '.join(words[:-1])} or {words[-1]}"
    return Kind(expected, parse)


def _block(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {str(name): item for name, item in value.items()}


def _list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return list(value)


def _numbers(value: object) -> Any:
    kind = number(None)
    if isinstance(value, list | tuple):
        return [kind.read(item) for item in value]
    return kind.read(value)


def _pair(value: object) -> tuple[float, float]:
    kind = number(0.0)
    first, second = _list(value)
    return kind.read(first), kind.read(second)


def _stage(value: object) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list | tuple):
        return [count(0, 3).read(item) for item in value]
    return "all" if str(value).lower() == "all" else count(0, 3).read(value)


def _switch(value: object) -> Any:
    if not isinstance(value, Mapping):
        return YES_NO.read(value)
    # A block in which nothing is on, such as `{"deepcompile": false}`, is off.
    return _block(value) if any(value.values()) else False


TEXT = Kind("a text", str)
INTERVAL = Kind("a whole number of at least 1, or Infinity for never", _interval)
BLOCK = Structure("a block of keys", str, check=_block)
LIST = Structure("a list", str, check=_list)
SWITCH = Structure("yes, no, or a block of keys", str, check=_switch)
NUMBERS = Structure("a number, or a list of them", str, check=_numbers)
PAIR = Structure("a list of two numbers of at least 0", str, check=_pair)
STAGE = Structure("0, 1, 2 or 3 (for autotuning also a list of them, or all)", str, check=_stage)
ANY = Structure("any value", str)
DTYPE = word("fp32", "fp16", "bf16", float32="fp32", float="fp32", float16="fp16", half="fp16", bfloat16="bf16")
