"""What lies in a folder of checkpoints, seen from outside: no tensor is read, and torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint import retention
from paceline.checkpoint.manifest import NAME, Manifest, verify
from paceline.checkpoint.store import Store, store_for
from paceline.world.layout import Layout

AUTOMATIC = "checkpoints"  # the folder of automatic names within a run's own
_UNFINISHED = (".partial-", ".aside-")


@dataclass(frozen=True)
class Entry:
    """One checkpoint, or what a save left that did not end.

    Attributes:
        name, path: its folder.
        bytes: of all files in it.
        manifest: None of an unfinished save, or where the manifest cannot be read.
        problems: files that are missing or have another length; none are read.
        unfinished: whether a save did not come to its end here.
    """

    name: str
    path: str
    bytes: int
    manifest: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    unfinished: bool = False

    @property
    def state(self) -> str:
        """ "complete", "damaged" or "unfinished"."""
        return "unfinished" if self.unfinished else "damaged" if self.problems else "complete"

    def json(self) -> dict[str, Any]:
        """As JSON values."""
        made = self.manifest
        return {
            "name": self.name,
            "path": self.path,
            "state": self.state,
            "bytes": self.bytes,
            "step": made and made.step,
            "created": made and made.created,
            "world_size": made and made.world_size,
            "plan": made and plan_in_short(made),
            "metrics": made.metrics if made else {},
            "problems": [in_words(each) for each in self.problems],
        }


def in_words(problem: Problem) -> str:
    """A problem with its reasons, on one line."""
    reasons = [problem.why] if isinstance(problem.why, str) else problem.why
    return f"{problem.what} {'; '.join(reasons)}"


def home_of(path: str) -> tuple[Store, str]:
    """The store of a path, and the path in its one spelling.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-store`.
    """
    store = store_for(path)
    home = store.resolve(path)
    if not store.exists(home):
        near = retention.near(store, home)
        raise CheckpointError(
            "checkpoint-missing",
            f"there is nothing at {home}.",
            why=f"checkpoints near it: {', '.join(near)}" if near else "no checkpoint lies near it",
            fix=f"say {near[-1]}" if near else "check the path",
        )
    return store, home


def is_checkpoint(store: Store, home: str) -> bool:
    """Whether a folder is a checkpoint itself, sound or not."""
    return store.exists(store.join(home, NAME))


def the_checkpoint(path: str) -> tuple[Store, str]:
    """As `home_of`, for one checkpoint.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`.
    """
    store, home = home_of(path)
    if not is_checkpoint(store, home):
        near = retention.near(store, home)
        raise CheckpointError(
            "checkpoint-none",
            f"{home} is not a checkpoint: it has no {NAME}.",
            why=f"checkpoints in or near it: {', '.join(near)}" if near else "no checkpoint lies near it",
            fix=f"say {near[-1]}" if near else "check the path; a finished checkpoint has a manifest.json",
        )
    return store, home


def the_folder(path: str) -> tuple[Store, str, list[Entry]]:
    """A folder of checkpoints, or that within a run's folder, and what lies there.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`.
    """
    store, home = home_of(path)
    for folder in (home, store.join(home, AUTOMATIC)):
        found = entries(store, folder)
        if found:
            return store, folder, found
    names = store.list(home)
    raise CheckpointError(
        "checkpoint-none",
        f"{home} holds no checkpoint.",
        why=f"it holds {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else "it is empty",
        fix="say a checkpoint, the folder that holds some, or the project_dir of a run",
    )


def entries(store: Store, folder: str) -> list[Entry]:
    """Checkpoints directly in a folder, the oldest first, then what unfinished saves left there."""
    found = [entry(store, store.join(folder, name), name) for name in store.list(folder)]
    return sorted(filter(None, found), key=lambda each: (each.unfinished, *_place(store, each)))


def entry(store: Store, path: str, name: str) -> Entry | None:
    """What lies at a path; None where it has nothing to do with checkpoints."""
    left = name.startswith(".") and any(mark in name for mark in _UNFINISHED)
    whole = not left and is_checkpoint(store, path)
    if not store.folder(path) or not (left or whole or retention.number(store, path) is not None):
        return None
    size = sum(store.files(path).values())
    if not whole:
        return Entry(name, path, size, unfinished=True)
    try:
        manifest = Manifest.read(store, path)
    except CheckpointError as error:
        return Entry(name, path, size, problems=error.problems)
    return Entry(name, path, size, manifest, tuple(verify(path, store, names=(), manifest=manifest)))


def _place(store: Store, each: Entry) -> tuple[int, float, str]:
    number = retention.number(store, each.path)
    return -1 if number is None else number, each.manifest.created if each.manifest else 0.0, each.name


def plan_in_short(manifest: Manifest) -> str:
    """The layout and what else shapes a state, such as "replicate 2 x tp 2, bf16"."""
    plan = manifest.plan
    if not plan:
        return f"{manifest.world_size} ranks"
    words = [str(Layout(**plan.get("layout", {})))]
    words += [f"zero {plan['zero']}"] * bool(plan.get("zero"))
    words += [str(plan["precision"])] * (plan.get("precision", "no") != "no")
    words += [f"accumulate {plan['accumulate']}"] * (plan.get("accumulate", 1) != 1)
    return ", ".join(words)
