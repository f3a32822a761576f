"""The checkpoints in a folder: automatic names, their order, and which of them may be removed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.checkpoint_format import record_of
from paceline.checkpoint.format.manifest import NAME, Manifest
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store import Store
from paceline.plan.fqn import listed

AUTOMATIC = "checkpoints"  # the folder of automatic names within a run's own
PATTERN = re.compile(r"checkpoint_(\d+)")
_log = logging.getLogger("paceline.checkpoint")


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


def surplus(
    store: Store,
    folder: str,
    keep: Keep,
    just: str | None = None,
    damaged: Collection[str] = (),
    own: Collection[str] | None = None,
) -> list[str]:
    """Returns the automatically named checkpoints in a folder that no rule keeps, oldest first.

    The checkpoint that was just saved is never among them. Damaged ones are neither counted nor removed, since their intact
    files may be needed. Nor are those of other runs, if `own` says which are of this run; None means all of them.
    """
    whole: list[tuple[str, Manifest]] = []
    for path in numbered(store, folder).values():
        if path in damaged or (own is not None and path not in own):
            continue
        record = record_of(store, path)
        if record is not None:
            whole.append((path, record))
    # The one just saved counts as the newest, whatever its number is.
    stay = keep.stays(sorted(whole, key=lambda checkpoint: checkpoint[0] == just))
    return [path for path, _ in whole if path not in stay and path != just]


def remove(store: Store, path: str) -> None:
    """Removes an old checkpoint. That it cannot be removed is only a warning, since the save itself has succeeded."""
    try:
        store.remove(path)
    except FileNotFoundError:
        return  # another run that goes on from the same one, or a person, was faster
    except (OSError, CheckpointError) as error:
        _log.warning("could not remove the old checkpoint %s: %s; remove it by hand", path, error)
