"""Describes the differences between a state and a checkpoint, with the names and shapes that cause them."""

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
        missing: dict[str, Shape] = {}
        misshapen: dict[str, tuple[Shape, Shape]] = {}
        unexpected: dict[str, Shape] | None = None
        for mismatch in ranks:
            of_rank = cls() if mismatch is None else mismatch
            missing |= of_rank.missing
            misshapen |= of_rank.misshapen
            if unexpected is None:
                unexpected = dict(of_rank.unexpected)
            # With a pipeline each rank has only some of the model, and finds the names of the other stages unexpected.
            unexpected = {name: shape for name, shape in unexpected.items() if name in of_rank.unexpected}
        return cls(missing, unexpected or {}, misshapen)

    def problem(self, owner: str, path: str) -> Problem:
        """Returns the one problem that says all of this."""
        reasons = _listed("missing in the checkpoint", _with_closest(self.missing, self.unexpected))
        reasons += _listed("only in the checkpoint", _with_closest(self.unexpected, self.missing))
        misshapen = [f"{name}: {saved} there, {here} here" for name, (saved, here) in self.misshapen.items()]
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
        line = f"{name} {shape}"
        if len(lines) < _LISTED:  # the rest is only counted
            # A renamed tensor has kept its shape, so names of that shape are better candidates than similar names.
            of_that_shape = [other for other in others if others[other] == shape]
            for closest in get_close_matches(name, of_that_shape or others, n=1, cutoff=0.5):
                line += f" (closest: {closest})"
        lines.append(line)
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
        of_kind = saved[kind]
        if set(of_kind) != set(objects):
            problems.append(_other_owners(kind, sorted(of_kind), sorted(objects)))
            continue
        types_saved = [str(of_kind[name].get("type")) for name in sorted(objects)]
        types_here = [type(objects[name]).__qualname__ for name in sorted(objects)]
        if kind in ("optimizers", "schedulers"):
            for name, saved_type, type_here in zip(sorted(objects), types_saved, types_here, strict=True):
                if saved_type != type_here:
                    problems.append(_other_type(kind, name, saved_type, type_here))
        # Registered objects have no names of their own. A class may be renamed between save and load; where the classes
        # are the same in another order, the objects have changed places.
        if kind == "custom" and types_saved != types_here and sorted(types_saved) == sorted(types_here):
            problems.append(_other_order(types_saved, types_here))
    return problems


def _other_owners(kind: str, saved: list[str], here: list[str]) -> Problem:
    return Problem(
        "checkpoint-owners",
        f"the checkpoint holds {len(saved)} {kind}, but this run has {len(here)}.",
        why=[f"in the checkpoint: {', '.join(saved) or 'none'}", f"here: {', '.join(here) or 'none'}"],
        fix="prepare and register the same objects as in the run that saved it, or pass strict=False",
    )


def _other_order(saved: list[str], here: list[str]) -> Problem:
    return Problem(
        "checkpoint-owners",
        "the registered objects have another order than in the checkpoint.",
        why=[f"in the checkpoint: {', '.join(saved)}", f"here: {', '.join(here)}"],
        fix="call `register_for_checkpointing` in the order of the run that saved it",
    )


def _other_type(kind: str, name: str, saved: str, here: str) -> Problem:
    return Problem(
        "checkpoint-owners",
        f"{kind}/{name} was a {saved} in the checkpoint and is a {here} here.",
        why="the state of one kind means nothing to another",
        fix=f"build a {saved} as in the run that saved it, or pass strict=False to load the rest",
    )
