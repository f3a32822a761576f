"""`Key`: one row of the table of DeepSpeed's keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config.kinds import Kind
from paceline_doors.cases import Case, Placeholder

NOTHING = "it asks for nothing"


class Derived(Placeholder):
    """Stands for what follows from the value that was given.

    Args:
        text: the same in words, for the docs.
        of: value -> ours.
    """

    def __init__(self, text: str, of: Callable[[Any], Any]) -> None:
        super().__init__(text)
        self.of = of


@dataclass(frozen=True)
class Staged(Case):
    """A case that counts at some stages of ZeRO alone.

    Attributes:
        stages: their digits, such as "12".
    """

    stages: str = "0123"


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: with those of its blocks: "fp16.loss_scale".
        kind: how its value is read.
        default: DeepSpeed's own; it needs no notice.
        doc: what it is for, in one sentence.
        cases: the first one that fits counts; where none does, its value is read by who `doc` says.
        hint: TrainingArguments' name of what "auto" stands for.
        old: other names of it.
        needs: what else must be said for it to count, such as "zero_optimization.offload_optimizer.device=cpu".
        required: "auto" has no default.
        always: its default counts too where its block is switched on.
    """

    name: str
    kind: Kind
    default: Any
    doc: str
    cases: tuple[Case, ...] = ()
    hint: str = ""
    old: tuple[str, ...] = ()
    needs: str = ""
    required: bool = False
    always: bool = False


def key(name: str, kind: Kind, default: object, doc: str, *cases: Case, **more: Any) -> Key:
    """Makes a row; `more` are the remaining attributes of `Key`."""
    return Key(name, kind, default, doc, cases, **more)


def idle(name: str, kind: Kind, default: object, why: str, **more: Any) -> Key:
    """Makes the row of a key without effect here."""
    return Key(name, kind, default, "", (Case("*", why=why),), **more)


def gone(name: str, kind: Kind, default: object, why: str, fix: str) -> Key:
    """Makes the row of a key that is refused where it is switched on."""
    return Key(name, kind, default, "", (Case("false", why=NOTHING), Case("*", why=why, fix=fix)))
