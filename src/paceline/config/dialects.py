"""Config dialects: what other libraries call our settings, on the command line, in variables and in files.

A library's dialect is a file in `compat/LIBRARY/` with a last line `DIALECT = ...`, or another distribution's entry point
`paceline.config_dialects`. The core asks all dialects alike and knows none of them:

    alias of a setting    --num_machines 2          aliases, variables      Given("num_machines", "2", ...)
    its own field         fsdp_sharding_strategy    knows, translate        Given("zero", 2, ...), or no effect, or a problem
    several at once       zero_stage and others     from_flags, from_file   the same
    anything else         --tpu                     judge                   no effect, or a problem
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.errors import Problem
from paceline.base.registry import Registry
from paceline.config.given import Choice, Given

# How the reason of a value begins that is no setting of ours, but takes effect in the script by a variable.
HANDED_ON = "the script reads it from "
DIALECTS = Registry("paceline.config", "DIALECT", "paceline.config_dialects", libraries="paceline.compat")


@dataclass
class Translation:
    """What became of a list of values.

    Attributes:
        given: in our words.
        unused: those without effect, each with the reason.
        problems: those that ask for what is not there.
        consumed: names of values that were read here, and that nobody else need look at.
        variables: of the library's own, by which its objects in the script learn what the launcher was told.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)

    def add(self, other: Translation) -> None:
        """Takes in what became of other values."""
        self.given += other.given
        self.unused += other.unused
        self.problems += other.problems
        self.consumed |= other.consumed
        self.variables |= other.variables


class ConfigDialect:
    """One library's words; a subclass says those that it has, and inherits "none" for the rest.

    Attributes:
        name: the library's.
        aliases: its names of settings of ours, as flags and as keys of a file -> the setting.
        variables: its environment variables for settings of ours -> the setting; ours win over them.
        flags: its other flags -> whether a value follows.
        shorts: flags of those that are also one letter -> the letter.
        blocks: blocks in its files whose keys are read one by one -> what those keys begin with.
        together: keys at the top of its files that `from_file` reads.
        explains: what its own config file is, where `explain` can show what one means; "" where there is none.
    """

    name: str = ""
    aliases: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    flags: Mapping[str, bool] = {}
    shorts: Mapping[str, str] = {}
    blocks: Mapping[str, str] = {}
    together: tuple[str, ...] = ()
    explains: str = ""

    def names(self) -> list[str]:
        """Keys that its files may hold besides the aliases; a wrong key is compared with them."""
        return []

    def knows(self, given: Given) -> bool:
        """Whether `translate` reads a value of this name."""
        return False

    def translate(self, given: Sequence[Given], nodes: int) -> Translation:
        """Says its own fields in our words, where the values of all sources are known; others pass through.

        Args:
            given: values of all sources.
            nodes: hosts that take part.
        """
        return Translation(list(given))

    def judge(self, given: Given) -> Choice | Problem | None:
        """Why a value of one of its other names has no effect, or is refused; None where it has no such name."""
        return None

    def asks_nothing(self, unused: Choice) -> bool:
        """Whether a value without effect is one that nobody misses, and so needs no notice."""
        return False

    def notices(self, unused: Sequence[Choice]) -> tuple[str, ...]:
        """What the user should know of values that `translate` found to be without effect."""
        return ()

    def hand_over(self, unused: Sequence[Choice]) -> dict[str, str]:
        """Variables for the processes: values without effect here that the library's own objects show all the same."""
        return {}

    def from_env(self, env: Mapping[str, str]) -> list[Given]:
        """Its own fields that are set in the environment; `variables` are read without it."""
        return []

    def from_flags(self, flags: Sequence[Given]) -> Translation:
        """Reads flags that mean something only together."""
        return Translation()

    def from_file(self, keys: Mapping[str, Given]) -> Translation:
        """Reads keys of a file that mean something only together.

        Args:
            keys: those of `together` that the file holds; a block's value is the list of its keys.
        """
        return Translation()

    def default_file(self, env: Mapping[str, str]) -> Path | None:
        """Its own default config file, whether there is one or not; None where it has none."""
        return None

    def explain(self, path: str, flags: Sequence[Given], *, as_json: bool, changed: bool) -> str:
        """What a config file of its own means here (see `explains`).

        Args:
            path: the file.
            flags: what stood on the command line.
            as_json: JSON in place of a table.
            changed: leave out settings that have their default.
        """
        raise NotImplementedError


def dialects() -> Iterator[ConfigDialect]:
    """All dialects, in the order of their names."""
    yield from DIALECTS


def known_flags() -> dict[str, bool]:
    """The flags of all dialects that are no aliases of settings -> whether a value follows."""
    flags: dict[str, bool] = {}
    for dialect in dialects():
        flags |= dialect.flags
    return flags


def known_shorts() -> dict[str, str]:
    """The flags of all dialects that are also one letter -> the letter."""
    shorts: dict[str, str] = {}
    for dialect in dialects():
        shorts |= dialect.shorts
    return shorts


def known_by_a_dialect(given: Given) -> bool:
    """Whether some dialect translates values of this name."""
    return any(dialect.knows(given) for dialect in dialects())


def judged(given: Given) -> Choice | Problem | None:
    """What the first dialect that has such a name says of it; None where none has."""
    for dialect in dialects():
        verdict = dialect.judge(given)
        if verdict is not None:
            return verdict
    return None


def notice_of(unused: Choice) -> str:
    """What to tell the user about a value without effect; "" where `paceline explain` is enough."""
    if unused.reason.startswith(HANDED_ON):
        return ""
    asks_nothing = any(dialect.asks_nothing(unused) for dialect in dialects())
    if asks_nothing and unused.source != "command line":
        return ""
    reason = unused.reason.removeprefix("no effect here: ")
    return f"{unused.field} ({unused.where}) has no effect: {reason}."
