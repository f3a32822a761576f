"""What differs between a state and a checkpoint, said so that one sees why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from paceline.base.errors import Problem

Shape = tuple[int, ...]
_LISTED = 8


@dataclass
class Mismatch:
    """Names of one owner that differ.

    Attributes:
        missing: those that the checkpoint lacks, with their shape here.
        unexpected: those that only the checkpoint has, with their shape there.
        misshapen: those of both, with the shape there and the shape here.
    """

    missing: dict[str, Shape] = field(default_factory=dict)
    unexpected: dict[str, Shape] = field(default_factory=dict)
    misshapen: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    @classmethod
    def of_all(cls, ranks: Sequence[Mismatch | None]) -> Mismatch:
        """What is wrong for all ranks together: a name that any rank expects is not unexpected."""
        found = cls()
        for mismatch in ranks:
            if mismatch is not None:
                found.missing |= mismatch.missing
                found.misshapen |= mismatch.misshapen
        first = ranks[0].unexpected if ranks[0] is not None else {}
        found.unexpected = {
            name: shape for name, shape in first.items() if all(rank and name in rank.unexpected for rank in ranks)
        }
        return found

    def problem(self, owner: str, path: str) -> Problem:
        """The one problem that says all of this."""
        reasons = _listed("missing in the checkpoint", _with_closest(self.missing, self.unexpected))
        reasons += _listed("only in the checkpoint", _with_closest(self.unexpected, self.missing))
        misshapen = [f"{name}: {there} there, {here} here" for name, (there, here) in self.misshapen.items()]
        reasons += _listed("of another shape", misshapen)
        return Problem(
            "checkpoint-other-model",
            f"the checkpoint {path} was saved from another model than {owner}.",
            why=reasons,
            fix="build the model as it was saved, or pass strict=False to load the names that agree "
            "(shapes must agree always)",
        )


def _with_closest(names: Mapping[str, Shape], others: Mapping[str, Shape]) -> list[str]:
    lines: list[str] = []
    for name, shape in names.items():
        alike = [other for other in others if others[other] == shape] or list(others)
        close = get_close_matches(name, alike, n=1, cutoff=0.5) if len(lines) < _LISTED else []
        lines.append(f"{name} {shape}" + (f" (closest: {close[0]})" if close else ""))
    return lines


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return [f"{len(lines)} {title}: {'; '.join(lines[:_LISTED])}{more}"]


def owner_problems(saved: Mapping[str, Any], here: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Owners that only one side has, and owners of another type.

    Args:
        saved: the JSON of a checkpoint.
        here: objects by kind ("optimizers", say) and name.
    """
    problems = []
    for kind, objects in here.items():
        there = saved[kind]
        if set(there) != set(objects):
            problems.append(_other_owners(kind, sorted(there), sorted(objects)))
            continue
        for name, item in objects.items():
            was, now = there[name].get("type"), type(item).__qualname__
            if kind in ("optimizers", "schedulers") and was != now:
                problems.append(_other_type(kind, name, was, now))
        problems += _other_order(kind, there, objects)
    return problems


def _other_owners(kind: str, there: list[str], here: list[str]) -> Problem:
    return Problem(
        "checkpoint-owners",
        f"the checkpoint holds {len(there)} {kind}, but this run has {len(here)}.",
        why=[f"in the checkpoint: {', '.join(there) or 'none'}", f"here: {', '.join(here) or 'none'}"],
        fix="prepare and register the same objects as in the run that saved it, or pass strict=False",
    )


def _other_order(kind: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Problem]:
    """Registered objects have no names of their own; a class may be renamed, but the same classes have changed places."""
    was = [str(there[name].get("type")) for name in sorted(there)]
    now = [type(here[name]).__qualname__ for name in sorted(here)]
    if kind != "custom" or was == now or sorted(was) != sorted(now):
        return []
    return [
        Problem(
            "checkpoint-owners",
            "the registered objects have another order than in the checkpoint.",
            why=[f"in the checkpoint: {', '.join(was)}", f"here: {', '.join(now)}"],
            fix="call `register_for_checkpointing` in the order of the run that saved it",
        )
    ]


def _other_type(kind: str, name: str, was: str, now: str) -> Problem:
    return Problem(
        "checkpoint-owners",
        f"{kind}/{name} was a {was} in the checkpoint and is a {now} here.",
        why="the state of one kind means nothing to another",
        fix=f"build a {was} as in the run that saved it, or pass strict=False to load the rest",
    )
