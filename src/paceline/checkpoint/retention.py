"""Which checkpoints a folder holds: automatic names, the newest that verifies, and what may go."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from paceline.base.errors import CheckpointError
from paceline.checkpoint.manifest import Manifest, verify
from paceline.checkpoint.store import Store

PATTERN = re.compile(r"checkpoint_(\d+)")
_log = logging.getLogger("paceline.checkpoint")


@dataclass(frozen=True)
class Keep:
    """Which automatically named checkpoints stay; one that any rule names does, and the newest always.

    Attributes:
        last: the newest so many; None keeps all.
        every: those whose step is a multiple of this.
        best: name of a metric given to `save_state(metrics=...)`: the checkpoint with the best value stays.
        mode: whether the best value is the "min" or the "max".

    Raises:
        CheckpointError: `checkpoint-keep`.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        wrong = [number for number in (self.last, self.every) if number is not None and number < 1]
        if wrong:
            raise CheckpointError(
                "checkpoint-keep",
                f"{wrong[0]} checkpoints cannot be kept.",
                why="the one just saved is always kept",
                fix="keep 1 or more, or None for all",
            )

    @classmethod
    def of(cls, total_limit: int | None, keep: Keep | None) -> Keep:
        """The rule that a number or a rule means."""
        if keep is None:
            return cls(last=total_limit)
        if total_limit is not None:
            raise CheckpointError(
                "checkpoint-keep",
                "it was said twice how many checkpoints are kept.",
                why=f"total_limit={total_limit} and keep={keep}",
                fix=f"say keep=Keep(last={total_limit}, ...) alone",
            )
        return keep


def number(store: Store, path: str) -> int | None:
    """N of `.../checkpoint_N`; None for any other name."""
    found = PATTERN.fullmatch(store.parent(path)[1])
    return int(found[1]) if found else None


def numbered(store: Store, folder: str) -> dict[int, str]:
    """Paths with automatic names in a folder, whole or not, by number, lowest first."""
    paths = {number(store, path): path for path in (store.join(folder, name) for name in store.list(folder))}
    return dict(sorted((key, path) for key, path in paths.items() if key is not None))


def following(store: Store, folder: str, start: int = 0) -> str:
    """The first automatic name above all that lie in a folder."""
    return store.join(folder, f"checkpoint_{max([start - 1, *numbered(store, folder)]) + 1}")


def checkpoints(store: Store, folder: str) -> list[str]:
    """Checkpoints directly in a folder, oldest first: by number where they have one, else by time."""
    found = []
    for name in store.list(folder):
        path = store.join(folder, name)
        manifest = None if name.startswith(".") else Manifest.find(store, path)
        if manifest is not None:
            place = number(store, path)
            found.append((-1 if place is None else place, manifest.created, path))
    return [path for _, _, path in sorted(found)]


def newest(store: Store, folder: str) -> str | None:
    """The newest checkpoint in a folder that verifies; the log says which newer ones are damaged."""
    for path in reversed(checkpoints(store, folder)):
        problems = verify(path, store)
        if not problems:
            return path
        _log.warning("passing over %s: %s", path, "; ".join(f"{p.what} {p.why}" for p in problems))
    return None


def near(store: Store, path: str) -> list[str]:
    """Checkpoints within a folder, or else beside it, oldest first."""
    return checkpoints(store, path) or checkpoints(store, store.parent(path)[0])


def prune(store: Store, folder: str, keep: int, just: str) -> None:
    """Removes the oldest automatically named checkpoints beyond `keep`, never the one just saved.

    What cannot be removed stays, with a warning: the save that came before has succeeded.
    """
    older = [path for path in numbered(store, folder).values() if path != just and Manifest.find(store, path)]
    for path in older[: max(0, len(older) + 1 - keep)]:
        try:
            store.remove(path)
        except OSError as error:
            _log.warning("could not remove the old checkpoint %s: %s; remove it by hand", path, error)
