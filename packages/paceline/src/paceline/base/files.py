"""Paths as users write them, and files that other processes may read while they are written."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns a path with the home folder in place of "~" or "~user"; with a user that does not exist it stays as it is.

    `Path.expanduser` raises a bare RuntimeError for such a user. A path that stays is reported where it is not found.
    """
    return Path(os.path.expanduser(path))


def replace_text(path: Path, text: str) -> None:
    """Writes a file, and creates its folder. A process that reads at the same time gets the whole old or the whole new text.

    Raises:
        OSError: the file cannot be written; the old file is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The new text is complete before it gets the name of the file, because renaming within a folder is atomic. The number of
    # the process keeps two writers from using the same temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Returns whether a file exists, also if another host has created it a moment ago on a network drive."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return True
    path.unlink()
    return False
