"""The checkpoints in a folder: automatic names, their order, and which of them may be removed."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.manifest import NAME, Manifest
from paceline.checkpoint.store import Store
from paceline.config.keywords import checked_keywords
from paceline.plan.fqn import listed

AUTOMATIC = "checkpoints"  # the folder of automatic names within a run's own
PATTERN = re.compile(r"checkpoint_(\d+)")
_log = logging.getLogger("paceline.checkpoint")


@checked_keywords
@dataclass(frozen=True)
class Keep:
    """Which automatically named checkpoints are kept: those of any rule, and the last one. Without a rule all are kept.

    Attributes:
        last: keeps this number of the newest checkpoints.
        every: keeps checkpoints whose step is a multiple of this number.
        best: the name of a metric of `save_state(metrics=...)`: keeps the checkpoint with the best value, of several the
            newest. A checkpoint whose value is NaN is never the best.
        mode: whether the best value is the "min" or the "max".

    Raises:
        CheckpointError: `checkpoint-keep`.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None:
                _check_count(f"Keep({name}=...)", number)
        if self.mode not in ("min", "max"):
            raise CheckpointError(
                "checkpoint-keep",
                f"the best value of {self.best!r} is neither the smallest nor the largest: mode={self.mode!r}.",
                fix='write mode="min" or mode="max"',
            )

    @classmethod
    def of(cls, total_limit: int | None, keep: Keep | None) -> Keep:
        """Returns the rule for the arguments of `Accelerator`, of which only one may be given."""
        if total_limit is not None:
            _check_count("total_limit", total_limit)
        if keep is None:
            return cls(last=total_limit)
        if not isinstance(keep, Keep):
            raise CheckpointError(
                "checkpoint-keep",
                f"{keep!r} is no rule for keeping checkpoints.",
                why="Accelerator(keep=...) takes a `Keep`; a number of checkpoints is total_limit",
                fix=f"write total_limit={keep}" if type(keep) is int else "write keep=Keep(last=3)",
            )
        if total_limit is not None:
            raise CheckpointError(
                "checkpoint-keep",
                "two arguments say how many checkpoints are kept.",
                why=f"total_limit={total_limit} and keep={keep}",
                fix=f"write only keep=Keep(last={total_limit}, ...)",
            )
        return keep

    def check(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        """Returns the metrics of a save as numbers.

        Raises:
            CheckpointError: `checkpoint-metric`, if one is no number, or the metric of `best` is missing.
        """
        given_metrics = metrics or {}
        try:
            numbers = {str(name): float(value) for name, value in given_metrics.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "checkpoint-metric",
                "a metric is no number.",
                why=str(error),
                fix="give numbers, or tensors of one element: `metrics={'loss': loss.item()}`",
            ) from None
        if self.best is not None and self.best not in numbers:
            given = ", ".join(numbers) or "none"
            raise CheckpointError(
                "checkpoint-metric",
                f"the best checkpoint is kept by {self.best!r}, which this save does not give.",
                why=f"keep=Keep(best={self.best!r}); metrics given: {given}",
                fix=f"save with `metrics={{{self.best!r}: value}}`; use NaN for a value that is not known",
            )
        return numbers

    @property
    def unknown(self) -> dict[str, float]:
        """Metrics for a save before the metric of `best` was measured: NaN."""
        return {} if self.best is None else {self.best: math.nan}

    def stays(self, checkpoints: Sequence[tuple[str, Manifest]]) -> set[str]:
        """Returns the paths of the checkpoints, given oldest first, that a rule keeps."""
        if self.last is None and self.every is None and self.best is None:
            return {path for path, _ in checkpoints}
        stay: set[str] = set()
        if self.last:
            stay |= {path for path, _ in checkpoints[-self.last :]}
        if self.every:
            stay |= {path for path, manifest in checkpoints if manifest.step % self.every == 0}
        # With the sign turned for "min", the best value is always the largest.
        sign = 1 if self.mode == "max" else -1
        best_path: str | None = None
        best_value = -math.inf
        for path, manifest in checkpoints:
            value = sign * manifest.metrics.get(self.best or "", math.nan)
            if value >= best_value:  # NaN compares as false; of equal values the newest counts
                best_path = path
                best_value = value
        if best_path is not None:
            stay.add(best_path)
        return stay


def _check_count(argument: str, value: object) -> None:
    """Refuses a value that is not a number of checkpoints or steps.

    Raises:
        CheckpointError: `checkpoint-keep`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise CheckpointError(
        "checkpoint-keep",
        f"{argument} cannot be {value!r}.",
        why="it is a whole number of at least 1: the checkpoint just saved is always kept",
        fix="write a number such as 3, or None, which keeps all of them",
    )


def number(store: Store, path: str) -> int | None:
    """Returns N of `.../checkpoint_N`; None for any other name."""
    match = PATTERN.fullmatch(store.parent(path)[1])
    if match is None:
        return None
    return int(match[1])


def numbered(store: Store, folder: str) -> dict[int, str]:
    """Returns the paths with automatic names in a folder, valid checkpoints or not, by number, lowest first."""
    paths: dict[int, str] = {}
    for name in store.list(folder):
        path = store.join(folder, name)
        count = number(store, path)
        if count is not None:
            paths[count] = path
    return dict(sorted(paths.items()))


def following(store: Store, folder: str, start: int = 0) -> str:
    """Returns the path with the next automatic name: above all numbers in the folder, and at least `start`."""
    highest = max([start - 1, *numbered(store, folder)])
    return store.join(folder, f"checkpoint_{highest + 1}")


def checkpoints(store: Store, folder: str) -> list[str]:
    """Returns the checkpoints directly in a folder, oldest first: by number if they have one, else by time."""
    by_age = []
    for name in store.list(folder):
        path = store.join(folder, name)
        # A save in progress is written into a folder whose name begins with a dot.
        manifest = None if name.startswith(".") else Manifest.find(store, path)
        if manifest is not None:
            by_age.append((order(store, path), manifest.created, path))
    return [path for _, _, path in sorted(by_age)]


def order(store: Store, path: str) -> int:
    """Returns the number of an automatic name; -1 for a name that the script has chosen."""
    count = number(store, path)
    return -1 if count is None else count


def newest_first(store: Store, folder: str, run: str = "") -> list[str]:
    """Returns the paths in a folder that have a manifest, newest first, also if the manifest cannot be read.

    Args:
        store: the store of the folder.
        folder: the folder.
        run: the launcher's name of a run, whose checkpoints are returned; "" for those of all runs.
    """
    paths = checkpoints(store, folder)
    for path in numbered(store, folder).values():
        if path not in paths and store.exists(store.join(path, NAME)):
            paths.append(path)  # its manifest cannot be read
    # All of them are reversed after the sort. `reverse=True` would leave paths that compare equal, those without a number,
    # in the order from old to new.
    newest = sorted(paths, key=lambda path: order(store, path))[::-1]
    if not run:
        return newest
    paths_of_run = []
    for path in newest:
        manifest = Manifest.find(store, path)
        # Without a readable manifest nobody knows whose it is. It is returned, so that the caller reports the damage.
        if manifest is None or manifest.run == run:
            paths_of_run.append(path)
    return paths_of_run


def near(store: Store, path: str) -> list[str]:
    """Returns the checkpoints in a folder, or if there are none, beside it, oldest first.

    Those with automatic names lie one folder deeper, in the folder of their run.
    """
    parent = store.parent(path)[0]
    for folder in (path, store.join(path, AUTOMATIC), parent, store.join(parent, AUTOMATIC)):
        paths = checkpoints(store, folder)
        if paths:
            return paths
    return []


def no_checkpoint(store: Store, path: str, advice: str = "load") -> CheckpointError:
    """Returns the error for a path that is no checkpoint. It names what is there, and checkpoints near it.

    Args:
        store, path: the path.
        advice: a verb for the fix: what to do with a checkpoint near it.
    """
    why = "there is no checkpoint near it"
    fix = "check the path; a finished checkpoint has a manifest.json"
    neighbours = near(store, path)
    if neighbours:
        why = f"checkpoints near it: {listed(neighbours, 8)}"
        fix = f"{advice} {neighbours[-1]}"
    if not store.exists(path):
        return CheckpointError("checkpoint-missing", f"there is no checkpoint {path}.", why=why, fix=fix)
    if not store.folder(path):
        what = f"{path} is not a checkpoint: it is a file, not a folder."
        return CheckpointError("checkpoint-none", what, why=[why], fix=fix)
    what = f"{path} is not a checkpoint: it has no {NAME}."
    return CheckpointError("checkpoint-none", what, why=[contents(store, path), why], fix=fix)


def contents(store: Store, folder: str) -> str:
    """Describes the contents of a folder that is no checkpoint, for an error."""
    if not store.folder(folder):
        return "it is a file, not a folder"
    names = store.list(folder)
    if not names:
        return "it is empty"
    return f"it holds {listed(names, 8)}"


def surplus(store: Store, folder: str, keep: Keep, just: str | None = None, damaged: Collection[str] = ()) -> list[str]:
    """Returns the automatically named checkpoints in a folder that no rule keeps, oldest first.

    The checkpoint that was just saved is never among them. Damaged ones are neither counted nor removed, since their intact
    files may be needed.
    """
    paths = [path for path in numbered(store, folder).values() if path not in damaged]
    whole: list[tuple[str, Manifest]] = []
    for path in paths:
        manifest = Manifest.find(store, path)
        if manifest is not None:
            whole.append((path, manifest))
    # The one just saved counts as the newest, whatever its number is.
    stay = keep.stays(sorted(whole, key=lambda checkpoint: checkpoint[0] == just))
    return [path for path, _ in whole if path not in stay and path != just]


def prune(store: Store, folder: str, keep: Keep, just: str | None = None, damaged: Collection[str] = ()) -> None:
    """Removes the checkpoints that `surplus` returns.

    One that cannot be removed is only a warning, since the save itself has succeeded.
    """
    for path in surplus(store, folder, keep, just, damaged):
        try:
            store.remove(path)
        except (OSError, CheckpointError) as error:
            _log.warning("could not remove the old checkpoint %s: %s; remove it by hand", path, error)
