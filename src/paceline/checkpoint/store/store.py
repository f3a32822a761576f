"""`Store`: where checkpoints lie. Paths are str, so that URIs survive; each kind is one file with `STORE = ...`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, Protocol

from paceline.base.errors import CheckpointError, short_repr
from paceline.base.registry import Registry

STORES = Registry("paceline.checkpoint.store", "STORE", "paceline.stores")
_PATHLIB = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


class Store(Protocol):
    """Files and folders of one kind of place.

    A save writes into the folder that `stage` gave and calls `publish`, on rank 0, once every file is there:
    until then nothing at the final path has changed, and from then on the new checkpoint stands there whole.
    """

    def serves(self, path: str) -> bool:
        """Whether `path` belongs to this kind of place; true for one store alone."""

    def resolve(self, path: str) -> str:
        """The one spelling of `path` that does not depend on the working directory."""

    def join(self, folder: str, *names: str) -> str:
        """Path of a name within a folder."""

    def parent(self, path: str) -> tuple[str, str]:
        """The folder that holds `path`, and its name there."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder lies at `path`."""

    def folder(self, path: str) -> bool:
        """Whether a folder lies at `path`."""

    def list(self, folder: str) -> list[str]:
        """Names directly in a folder, sorted; none where there is no such folder."""

    def files(self, folder: str) -> dict[str, int]:
        """Every file under a folder, by its relative name with `/`, and its bytes."""

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file, "rb" or "wb" (making its folder); closing a written one makes it durable."""

    def remove(self, path: str) -> None:
        """Removes a file or a whole folder; a folder that is half removed must not look whole."""

    def stage(self, path: str) -> str:
        """Makes a fresh place beside `path` to write into."""

    def publish(self, staged: str, path: str, *, last: str, replaces: Collection[str] | None) -> None:
        """Puts a staged folder in its place at once.

        Args:
            staged: what `stage` gave.
            path: where it belongs.
            last: name of the file that makes the folder valid.
            replaces: files of the valid folder that stands there, which go; all others there are kept.
                None where no valid folder stands there.
        """

    def recover(
        self,
        folder: str,
        mine: Callable[[str], bool],
        owned: Callable[[str], Collection[str] | None],
        *,
        clean: bool = True,
    ) -> None:
        """Cleans up after saves that did not end, and finishes those that were published halfway.

        Args:
            folder: the folder in which `stage` made its places.
            mine: whether a final name belongs to the caller.
            owned: files that the manifest of a folder lists; None without a manifest.
            clean: whether to delete as well; a reader, beside whom someone may be saving, must not.
        """

    def hold(self, folder: str, who: Mapping[str, str]) -> Callable[[], None]:
        """Keeps other runs from saving into a folder until the process ends, or what this returns is called.

        Args:
            folder: a checkpoint, or the folder of automatic names; it need not be there yet.
            who: this run, for the error that another one gets (`lock.this_run()`).

        A process that holds the folder already holds it twice; the last release frees it.

        Ranks: the one that publishes. Forked children do not hold it.

        Raises:
            CheckpointError: `checkpoint-locked`, naming the run that holds it.
        """


def confined(store: Store, folder: str, name: object, source: str) -> str:
    """The path of a name that a file gave, which must lie within that file's folder.

    The last part may be a link, which is followed for reading: in a cache of Hugging Face's every file of weights is one.
    A file that somebody sends can hold any text, but no link that is not sent along.

    Args:
        store, folder: where the file that names it lies.
        name: what it names.
        source: that file, for the error.

    Raises:
        CheckpointError: `checkpoint-unsafe`.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or {"", ".", ".."} & set(parts) or "\0" in str(name) or (os.sep != "/" and os.sep in str(name)):
        raise CheckpointError(
            "checkpoint-unsafe",
            f"{source} names {short_repr(name)}, which is no file or folder of {folder}.",
            why="a checkpoint may only name its own files: no absolute path, and no `..`",
            fix="do not use this checkpoint, and find out who changed it",
        )
    return store.join(folder, *parts)


def store_for(path: str | os.PathLike[str]) -> Store:
    """The store that serves `path`.

    Raises:
        CheckpointError: `checkpoint-store`, where none does.
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
        fix="use a folder on a disk, or install a store for this kind of path",
    )
