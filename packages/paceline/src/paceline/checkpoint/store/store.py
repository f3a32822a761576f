"""`Store`: a place for checkpoints, one file with `STORE = ...` for each kind. Paths are text: pathlib would change URLs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from typing import BinaryIO, Protocol

from paceline.base.errors import CheckpointError, short_repr
from paceline.base.parts import absent_names
from paceline.base.registry import Registry
from paceline.checkpoint.store import claim

STORES = Registry("paceline.stores", "store")
_log = logging.getLogger("paceline.checkpoint")
_PATHLIB = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


class Store(Protocol):
    """Files and folders in one kind of place.

    A save writes into the folder that `stage` returns. Once every file is there, rank 0 calls `publish`: until then nothing
    at the final path has changed, and afterwards the complete new checkpoint is there.
    """

    def serves(self, path: str) -> bool:
        """Returns whether `path` belongs to this kind of place; only one store may return True."""

    def resolve(self, path: str) -> str:
        """Returns the canonical form of `path`, which does not depend on the working directory."""

    def join(self, folder: str, *names: str) -> str:
        """Returns the path of a name in a folder."""

    def parent(self, path: str) -> tuple[str, str]:
        """Returns the folder of `path`, and its name there."""

    def exists(self, path: str) -> bool:
        """Returns whether `path` is a file or folder."""

    def folder(self, path: str) -> bool:
        """Returns whether `path` is a folder."""

    def list(self, folder: str) -> list[str]:
        """Returns the names directly in a folder, sorted; an empty list if there is no such folder."""

    def files(self, folder: str) -> dict[str, int]:
        """Returns the size of every file below a folder, by its relative name with `/`."""

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file, "rb" or "wb" (which creates its folder). A written file is durable once it is closed."""

    def remove(self, path: str) -> None:
        """Removes a file or a whole folder. A folder that is removed in part must not look complete."""

    def stage(self, path: str, *, fresh: bool = False) -> str:
        """Creates a new folder to write a save into. No other save writes there, whatever it writes at the same time.

        Args:
            path: the final path.
            fresh: whether `path` is an automatic name, which must be new. It is taken until `publish`, or until the folder is
                removed.

        Raises:
            NameTakenError: `fresh` is set, and another save has the name.
        """

    def publish(self, staged: str, path: str, *, last: str, owned: Callable[[str], Collection[str] | None]) -> None:
        """Moves a staged folder to its final path at once. What is there is replaced, also what another run has just published.

        Args:
            staged: the result of `stage`.
            path: the final path.
            last: the name of the file that makes the folder valid.
            owned: returns the files in the manifest of a folder; None without a manifest. These files of the folder at `path`
                are removed, and all others there are kept.
        """

    def recover(
        self,
        folder: str,
        mine: Callable[[str], bool],
        owned: Callable[[str], Collection[str] | None],
        *,
        clean: bool = True,
    ) -> None:
        """Cleans up after saves that were interrupted, and finishes those that were published in part.

        Nothing is deleted that may belong to a save that is under way; see `claim`.

        Args:
            folder: the folder in which `stage` has created its folders.
            mine: returns whether a final name belongs to the caller.
            owned: returns the files in the manifest of a folder; None without a manifest.
            clean: whether to delete as well. A reader does not.
        """


def discard(store: Store, staged: str) -> None:
    """Removes a folder that `stage` has created, whose save has failed."""
    # Whether it can be removed now or not, nobody writes it any more.
    claim.end(staged)
    try:
        if store.exists(staged):
            store.remove(staged)
    except (OSError, CheckpointError) as error:  # the error of the save itself is being raised
        _log.warning("could not remove the unfinished %s (%s); the next save tries again", staged, error)


def confined(store: Store, folder: str, name: object, source: str) -> str:
    """Returns the path of a name that a file contains, if it is in the folder of that file.

    The last part may be a link, which is followed for reading: in Hugging Face's cache every file of weights is a link. A file
    from somebody else may contain any name, but a link cannot come from it.

    Args:
        store, folder: the folder of the file.
        name: the name in the file.
        source: the file, for the error.

    Raises:
        CheckpointError: `checkpoint-unsafe`.
    """
    parts = name.split("/") if isinstance(name, str) else []
    # An empty part is that of an absolute path, or of `a//b`.
    leads_out = not parts or bool({"", ".", ".."} & set(parts))
    # On Windows a backslash separates folders too.
    has_other_separator = os.sep != "/" and os.sep in str(name)
    if leads_out or "\0" in str(name) or has_other_separator:
        raise CheckpointError(
            "checkpoint-unsafe",
            f"{source} names {short_repr(name)}, which is no file or folder of {folder}.",
            why="a checkpoint may only name its own files: no absolute path, and no `..`",
            fix="do not use this checkpoint, and find out who changed it",
        )
    return store.join(folder, *parts)


def store_for(path: str | os.PathLike[str]) -> Store:
    """Returns the store that serves `path`.

    Raises:
        CheckpointError: `checkpoint-store`, if there is none.
    """
    text = os.fspath(path)
    if _PATHLIB.match(text):
        raise CheckpointError(
            "checkpoint-store",
            f"{text!r} was a URL and has lost a slash.",
            why="pathlib folds `//` into `/`",
            fix=f"give URLs as text: {text.replace(':/', '://', 1)!r}",
        )
    for store in STORES:
        if store.serves(text):
            return store  # type: ignore[no-any-return]
    raise CheckpointError(
        "checkpoint-store",
        f"no store serves {text!r}.",
        why=f"known stores: {', '.join(STORES.names())}",
        fix="; ".join([*absent_names(STORES.group), "or use a folder on a disk"]).removeprefix("or "),
    )
