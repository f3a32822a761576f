"""`StoreApart`: while a job is rehearsed, its checkpoints go to a folder of the drill, and those that exist stay as they are.

It stands before the other stores. A path of this machine is written below the folder of the drill; what is not there, and is
asked for by its name (weights to start from), is read from where it is. Listings show only what the drill has written, so
that `resume()` finds no checkpoint of the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from paceline.base.errors import CheckpointError
from paceline.checkpoint.store.local import LocalStore
from paceline.checkpoint.store.store import STORES

_NAME = "0-rehearse"  # stores are asked in the order of their names


class StoreApart:
    """Serves all paths in place of the other stores.

    Args:
        folder: where everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._local = LocalStore()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # The rest of `Store`, whose first argument is a path.
        return lambda path, *args, **options: getattr(self._local, name)(self._inside(path), *args, **options)

    def serves(self, path: str) -> bool:
        """Every path: one that it cannot serve must not reach the store of the user's checkpoints."""
        return True

    def resolve(self, path: str) -> str:
        """Returns the path below the folder of the drill.

        Raises:
            CheckpointError: `rehearse-store`, for a URL.
        """
        if not self._local.serves(path):
            raise CheckpointError(
                "rehearse-store",
                f"checkpoints in {path!r} cannot be rehearsed.",
                why="a rehearsal writes to a folder of its own, and this is the store of the real ones",
                fix="let the script save to a disk, by its own arguments: `paceline rehearse train.py --out {folder}`",
            )
        return self._inside(self._local.resolve(path))

    def exists(self, path: str) -> bool:
        """Returns whether the path is there, in the folder of the drill or outside."""
        return self._local.exists(self._to_read(path))

    def folder(self, path: str) -> bool:
        """Returns whether the path is a folder, in the folder of the drill or outside."""
        return self._local.folder(self._to_read(path))

    def files(self, folder: str) -> dict[str, int]:
        """Returns the sizes of all files below a folder."""
        return self._local.files(self._to_read(folder))

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file; one that is written is always in the folder of the drill."""
        return self._local.open(self._to_read(path) if mode == "rb" else self._inside(path), mode)

    def publish(self, staged: str, path: str, *, last: str, owned: Callable[[str], Collection[str] | None]) -> None:
        """As `Store.publish`."""
        self._local.publish(self._inside(staged), self._inside(path), last=last, owned=owned)

    def join(self, folder: str, *names: str) -> str:
        """As `Store.join`."""
        return self._local.join(folder, *names)

    def parent(self, path: str) -> tuple[str, str]:
        """As `Store.parent`."""
        return self._local.parent(path)

    def _inside(self, path: str) -> str:
        absolute = os.path.abspath(path)
        if absolute == self._folder or absolute.startswith(self._folder + os.sep):
            return absolute
        return os.path.join(self._folder, absolute.lstrip(os.sep))

    def _to_read(self, path: str) -> str:
        inside = self._inside(path)
        outside = os.sep + os.path.relpath(inside, self._folder)
        is_there = os.path.lexists(inside) or not os.path.lexists(outside)
        return inside if is_there else outside


def keep_apart(folder: Path) -> None:
    """Lets all checkpoints of this process go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    STORES.add(_NAME, StoreApart(folder))
