"""Config dialects: the names that other libraries use for Paceline's settings, as flags, variables and keys of files.

A library's dialect is a file in `compat/LIBRARY/` with a last line `DIALECT = ...`, or another distribution's entry point
`paceline.config_dialects`. The core calls the same methods of each dialect and contains no library's names:

    kind of name          example                   read by                 becomes
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

# The reason of a value begins with these words if it is no setting of Paceline, but reaches the script in a variable. Such
# a value has an effect there, so `notice_of` does not report it.
HANDED_ON = "the script reads it from "
DIALECTS = Registry("paceline.config_dialects", "dialect")


@dataclass
class Translation:
    """Holds the result of translating a list of values.

    Attributes:
        given: the values under the names of Paceline's settings.
        unused: the values without effect, each with the reason.
        problems: one for each value that asks for something that Paceline does not have.
        consumed: names of values that were read here; the caller skips them.
        variables: environment variables of the library, from which its objects in the script read the launcher's values.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)

    def add(self, other: Translation) -> None:
        """Adds the result for other values to this one."""
        self.given += other.given
        self.unused += other.unused
        self.problems += other.problems
        self.consumed |= other.consumed
        self.variables |= other.variables


class ConfigDialect:
    """Describes the names of one library. A subclass overrides what its library has; the defaults here mean "none".

    Attributes:
        name: name of the library.
        aliases: its name for a setting of Paceline, as a flag and as a key of a file -> the setting.
        variables: its environment variable for a setting of Paceline -> the setting; Paceline's variable overrides it.
        flags: its other flags -> whether a value follows.
        shorts: name of one of `flags` -> the one-letter form of the flag, if it has one.
        blocks: name of a block in its files whose keys are read one by one -> the prefix of these keys.
        together: keys at the top of its files that `from_file` reads.
        explains: a few words for its own config file, if `explain` can read one; "" if it cannot.
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
        """Returns the keys that its files may hold besides the aliases; a misspelled key is compared with them."""
        return []

    def knows(self, given: Given) -> bool:
        """Returns whether `translate` reads a value of this name."""
        return False

    def translate(self, given: Sequence[Given], nodes: int | None) -> Translation:
        """Translates its own fields into Paceline's settings, and returns all other values unchanged.

        Args:
            given: values of all sources.
            nodes: number of nodes that take part; None if it may change while the run lasts, as with `--nodes 1:3`.
        """
        return Translation(list(given))

    def judge(self, given: Given) -> Choice | Problem | None:
        """Returns why a value of one of its other names has no effect, or is refused; None if it has no such name."""
        return None

    def asks_nothing(self, unused: Choice) -> bool:
        """Returns whether a value without effect asks for nothing that the user would miss, so that it needs no notice."""
        return False

    def notices(self, unused: Sequence[Choice]) -> tuple[str, ...]:
        """Returns what the user should know about values that `translate` found to be without effect."""
        return ()

    def hand_over(self, unused: Sequence[Choice]) -> dict[str, str]:
        """Returns environment variables for the processes.

        They carry values that have no effect in Paceline, but that the library's own objects in the script still show.
        """
        return {}

    def from_env(self, env: Mapping[str, str]) -> list[Given]:
        """Returns its own fields that are set in the environment. The caller reads `variables` itself."""
        return []

    def from_flags(self, flags: Sequence[Given]) -> Translation:
        """Reads flags that mean something only together."""
        return Translation()

    def from_file(self, keys: Mapping[str, Given], flags: Sequence[Given] = ()) -> Translation:
        """Reads keys of a file that mean something only together, and flags that mean something only beside these keys.

        Args:
            keys: the keys of `together` that the file holds; the value of a block is the list of its keys.
            flags: of the command line. The result's `consumed` names those that need no further reading.
        """
        return Translation()

    def default_file(self, env: Mapping[str, str]) -> Path | None:
        """Returns the path of its default config file, whether the file exists or not; None if the library has none."""
        return None

    def explain(self, path: str, flags: Sequence[Given], *, as_json: bool, changed: bool) -> str:
        """Returns a text that shows what a config file of the library means in Paceline (see `explains`).

        Args:
            path: the file.
            flags: the flags of the command line.
            as_json: whether the text is JSON; otherwise it is a table.
            changed: whether settings that have their default are left out.
        """
        raise NotImplementedError


def dialects() -> Iterator[ConfigDialect]:
    """Yields all dialects, in the order of their names."""
    yield from DIALECTS


def known_flags() -> dict[str, bool]:
    """Returns the flags of all dialects that are not aliases of settings -> whether a value follows."""
    flags: dict[str, bool] = {}
    for dialect in dialects():
        flags |= dialect.flags
    return flags


def known_shorts() -> dict[str, str]:
    """Returns the flags of all dialects that have a one-letter form -> that form."""
    shorts: dict[str, str] = {}
    for dialect in dialects():
        shorts |= dialect.shorts
    return shorts


def known_by_a_dialect(given: Given) -> bool:
    """Returns whether a dialect translates values of this name."""
    return any(dialect.knows(given) for dialect in dialects())


def judged(given: Given) -> Choice | Problem | None:
    """Returns the judgement of the first dialect that has a value's name; None if no dialect has it."""
    for dialect in dialects():
        verdict = dialect.judge(given)
        if verdict is not None:
            return verdict
    return None


def notice_of(unused: Choice) -> str:
    """Returns what to tell the user about a value without effect; "" if showing it in `paceline explain` is enough."""
    if unused.reason.startswith(HANDED_ON):
        return ""
    asks_nothing = any(dialect.asks_nothing(unused) for dialect in dialects())
    # Other tools write such values into every file, so a notice would only disturb. A flag was typed on purpose.
    if asks_nothing and unused.source != "command line":
        return ""
    reason = unused.reason.removeprefix("no effect here: ")
    return f"{unused.field} ({unused.where}) has no effect: {reason}."
