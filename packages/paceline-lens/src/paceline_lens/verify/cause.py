"""`CauseTable`: what `paceline verify` can name as a cause, in the order in which it is looked for.

TABLE = CauseTable("difference")

@TABLE.add("rows-differ", "A step reads other samples", "Shuffle with the same seed on all ranks.")
def rows_differ(evidence): ...      a sentence with the evidence, or "" if there is none

TABLE.findings(evidence)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal["difference", "repeat", "plain", "itself", "ranks"]
Predicate = TypeVar("Predicate", bound=Callable[..., str])


@dataclass(frozen=True)
class DifferenceCause:
    """One entry of a table.

    Attributes:
        name: a stable name, for tests and scripts.
        title: the cause in one line.
        fix: what to do, in one or two sentences.
        evidence_for: returns a sentence with the evidence, or "" if there is none.
        explains: "difference" for a difference from the run on one process, "repeat" for a difference between two runs on one
            process, "plain" for a difference from the script from before, "itself" for a mistake that one run shows without
            any comparison, and "ranks" for scripts without Paceline (`bare/causes.py`).
        is_error: whether the numbers are wrong; otherwise it is a note.
    """

    name: str
    title: str
    fix: str
    evidence_for: Callable[..., str]
    explains: Kind
    is_error: bool


@dataclass(frozen=True)
class Diagnosis:
    """A cause with the sentence that is the evidence for it."""

    cause: DifferenceCause
    evidence: str


class CauseTable:
    """Causes that explain the same thing.

    Their order matters where only one may count, which is the first with evidence. A cause that has others as its
    consequences comes before them: unequal samples, for example, also make losses and gradients unequal.

    Args:
        explains: as of `DifferenceCause`.
    """

    def __init__(self, explains: Kind) -> None:
        self._explains = explains
        self._causes: list[DifferenceCause] = []

    def add(self, name: str, title: str, fix: str, *, is_error: bool = True) -> Callable[[Predicate], Predicate]:
        """Decorates the function that looks for the evidence of a cause; the arguments are those of `DifferenceCause`."""

        def decorate(predicate: Predicate) -> Predicate:
            self._causes.append(DifferenceCause(name, title, fix, predicate, self._explains, is_error))
            return predicate

        return decorate

    def __iter__(self) -> Iterator[DifferenceCause]:
        return iter(self._causes)

    def findings(self, *evidence: object) -> Iterator[Diagnosis]:
        """Yields the causes for which there is evidence, in the order of the table."""
        for cause in self._causes:
            sentence = cause.evidence_for(*evidence)
            if sentence:
                yield Diagnosis(cause, sentence)
