"""Kinds of values: how a value is parsed from text, and which values are accepted.

Flags, variables and values in files are all text and go through the same `parse`, so `no` means the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

from paceline.base.env import parse_bool
from paceline.base.host_port import host_and_port
from paceline.base.parts import absent_names
from paceline.base.registry import Registry


@dataclass(frozen=True)
class Kind:
    """Describes one kind of value.

    Attributes:
        expected: a phrase that says which values are accepted; in messages it follows the words "expected: ".
        parse: text -> value; raises ValueError for text of another kind.
        metavar: the placeholder of the value in `--help`; "" for a yes/no switch.
    """

    expected: str
    parse: Callable[[str], Any]
    metavar: str = ""

    def read(self, value: object) -> Any:
        """Parses text, or checks a value that is of this kind already.

        Raises:
            ValueError: the value is of another kind; the message is `expected`.
        """
        plain = value.value if isinstance(value, Enum) else value
        if plain is None or isinstance(plain, (dict, list, tuple, set)):
            raise ValueError(self.expected)
        # A value from code goes through its text as well, so that there is one rule for all sources: True becomes "True",
        # which `parse_bool` accepts, and 1.5 is refused where a whole number is expected.
        try:
            return self.parse(str(plain).strip())
        except ValueError:
            raise ValueError(self.expected) from None


def whole(minimum: int, *, auto: bool = False, maximum: int | None = None) -> Kind:
    """Accepts a whole number of at least `minimum`; with `auto` also the word "auto"."""

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
    """Accepts a whole number from `minimum` to `maximum`, or two of them as "LEAST:MOST"."""

    def parse(text: str) -> int | str:
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) > 2 or not minimum <= numbers[0] <= numbers[-1] <= maximum:
            raise ValueError(text)
        # "3:3" is the same as 3: the callers take a str for a range whose ends differ.
        if numbers[0] == numbers[-1]:
            return numbers[0]
        return f"{numbers[0]}:{numbers[-1]}"

    expected = f"a whole number from {minimum} to {maximum}, or a range such as {minimum}:3"
    return Kind(expected, parse, "N|LEAST:MOST")


def least_and_most(value: int | str) -> tuple[int, int]:
    """Returns the two ends of a value of `whole_or_range`; they are the same if it is one number."""
    least, _, most = str(value).partition(":")
    return int(least), int(most or least)


def seconds(zero: bool = False) -> Kind:
    """Accepts a time in seconds that is above zero; with `zero` also zero."""

    def parse(text: str) -> float:
        number = float(text)
        if not isfinite(number) or number < 0 or (number == 0 and not zero):
            raise ValueError(text)
        return number

    if zero:
        return Kind("a number of seconds, 0 or above", parse, "SECONDS")
    return Kind("a number of seconds above 0", parse, "SECONDS")


def positive() -> Kind:
    """Accepts a number above zero; a whole number is returned as an int."""

    def parse(text: str) -> float:
        number = float(text)
        if not isfinite(number) or number <= 0:
            raise ValueError(text)
        return int(number) if number == int(number) else number

    return Kind("a number above 0", parse, "NUMBER")


def one_of(*words: str) -> Kind:
    """Accepts one word of a list; capital letters do not matter."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    *first, last = words
    expected = f"{', '.join(first)} or {last}" if first else last
    return Kind(expected, parse, "|".join(words))


class Registered(Kind):
    """Accepts one name of a registry, or several joined by commas. No implementation is imported to check a name.

    A single name is shown in reverse order, which puts "no" before those that do something.

    Args:
        registry: the registry.
        several: whether several names are accepted.
    """

    def __init__(self, registry: Registry, *, several: bool = False) -> None:
        # Called at each use, since a registry can grow after this module was imported.
        def words() -> Kind:
            return some_of(*registry.names()) if several else one_of(*reversed(registry.names()))

        # The base class is a frozen dataclass, so its fields become properties, and attributes are set past its `__setattr__`.
        object.__setattr__(self, "_words", words)
        object.__setattr__(self, "hints", lambda: absent_names(registry.group))

    expected = property(lambda self: "; ".join([self._words().expected, *self.hints()]))
    parse = property(lambda self: self._words().parse)
    metavar = property(lambda self: self._words().metavar)


def some_of(*words: str, none: str = "", every: str = "") -> Kind:
    """Accepts words of a list, joined by commas; capital letters do not matter.

    Args:
        words: the words.
        none: a further word, which means none of them; "" for no such word.
        every: a further word, which means all of them; "" for no such word.
    """
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
    """Accepts text that a regular expression matches as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return Kind(expected, parse, metavar)


def _addresses(text: str) -> str:
    if not re.fullmatch(r"\S+", text):
        raise ValueError(text)
    for address in text.split(","):
        host, port = host_and_port(address)
        if not host or (port and int(port) > 65535):
            raise ValueError(text)
    return text


ADDRESSES = Kind("host names or IP addresses, each with or without :PORT, joined by commas", _addresses, "HOST")
YES_NO = Kind("yes or no", parse_bool)


def _yes_no_auto(text: str) -> bool | str:
    return "auto" if text.lower() == "auto" else parse_bool(text)


YES_NO_AUTO = Kind("yes, no or auto", _yes_no_auto, "yes|no|auto")


def _no_text(text: str) -> Any:
    raise ValueError(text)


# `config.options` reads these values option by option, because only the strategy knows which values an option accepts. So
# nothing may parse the block as a whole, and `_no_text` refuses to.
OPTIONS = Kind("a block of strategies, each with a block of its options", _no_text, "STRATEGY.OPTION=VALUE")
