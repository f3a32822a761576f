"""Kinds of values: how one is read from text, and what is expected of it.

Flags, variables and file values are all text, and go through the same `parse`; so `no` means the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

from paceline.base.env import parse_bool
from paceline.base.registry import Registry


@dataclass(frozen=True)
class Kind:
    """One kind of value.

    Attributes:
        expected: what a value must be, to follow the words "expected: ".
        parse: text -> value; raises ValueError for text of another kind.
        metavar: stands for the value in `--help`; "" for a yes/no switch.
    """

    expected: str
    parse: Callable[[str], Any]
    metavar: str = ""

    def read(self, value: object) -> Any:
        """Reads text, or a value that already is of this kind.

        Raises:
            ValueError: holding `expected`.
        """
        plain = value.value if isinstance(value, Enum) else value
        if plain is None or isinstance(plain, (dict, list, tuple, set)):
            raise ValueError(self.expected)
        try:
            return self.parse(str(plain).strip())
        except ValueError:
            raise ValueError(self.expected) from None


def whole(minimum: int, *, auto: bool = False, maximum: int | None = None) -> Kind:
    """A whole number of at least `minimum`, or the word "auto" where that is allowed."""

    def parse(text: str) -> int | str:
        if auto and text.lower() == "auto":
            return "auto"
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(text)
        return number

    bound = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
    if auto:
        return Kind(f"a whole number {bound}, or auto", parse, "N|auto")
    return Kind(f"a whole number {bound}", parse, "N")


def whole_or_range(minimum: int, maximum: int) -> Kind:
    """A whole number from `minimum` to `maximum`, or two of them as "LEAST:MOST"."""

    def parse(text: str) -> int | str:
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) > 2 or not minimum <= numbers[0] <= numbers[-1] <= maximum:
            raise ValueError(text)
        return numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]}:{numbers[-1]}"

    expected = f"a whole number from {minimum} to {maximum}, or a range such as {minimum}:3"
    return Kind(expected, parse, "N|LEAST:MOST")


def seconds(zero: bool = False) -> Kind:
    """A time above zero, in seconds; with `zero` also none."""

    def parse(text: str) -> float:
        number = float(text)
        if not isfinite(number) or number < 0 or (number == 0 and not zero):
            raise ValueError(text)
        return number

    if zero:
        return Kind("a number of seconds, 0 or above", parse, "SECONDS")
    return Kind("a number of seconds above 0", parse, "SECONDS")


def positive() -> Kind:
    """A number above zero."""

    def parse(text: str) -> float:
        number = float(text)
        if not isfinite(number) or number <= 0:
            raise ValueError(text)
        return int(number) if number == int(number) else number

    return Kind("a number above 0", parse, "NUMBER")


def one_of(*words: str) -> Kind:
    """One word of a list; capital letters do not matter."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    *first, last = words
    expected = f"{', '.join(first)} or {last}" if first else last
    return Kind(expected, parse, "|".join(words))


class OneRegistered(Kind):
    """One name of a registry, which may have grown by the time it is asked; what it finds is not imported.

    Args:
        registry: names of it are shown in reverse order, which puts "no" before what does something.
    """

    def __init__(self, registry: Registry) -> None:
        object.__setattr__(self, "_words", lambda: one_of(*sorted(registry.names(), reverse=True)))

    expected = property(lambda self: self._words().expected)
    parse = property(lambda self: self._words().parse)
    metavar = property(lambda self: self._words().metavar)


def some_of(*words: str, none: str = "", every: str = "") -> Kind:
    """Words of a list joined by commas, or one for none of them, or one for all; capital letters do not matter."""
    alone = [word for word in (none, every) if word]

    def parse(text: str) -> str:
        given_words = [word.strip().lower() for word in text.split(",")]
        if given_words == [every] and every:
            return ",".join(words)
        if given_words != [none] and not set(given_words) <= {*words}:
            raise ValueError(text)
        return ",".join(dict.fromkeys(given_words))

    expected = ", ".join([*alone, *words]) + "; several joined by commas"
    return Kind(expected, parse, "|".join([*alone, *words]))


def matching(pattern: str, expected: str, metavar: str) -> Kind:
    """Text of a given form."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return Kind(expected, parse, metavar)


YES_NO = Kind("yes or no", parse_bool)


def _yes_no_auto(text: str) -> bool | str:
    return "auto" if text.lower() == "auto" else parse_bool(text)


YES_NO_AUTO = Kind("yes, no or auto", _yes_no_auto, "yes|no|auto")


def _no_text(text: str) -> Any:
    raise ValueError(text)


# Read by `config.options`, option by option: which values an option takes is known to its strategy alone.
OPTIONS = Kind("a block of strategies, each with a block of its options", _no_text, "STRATEGY.OPTION=VALUE")
