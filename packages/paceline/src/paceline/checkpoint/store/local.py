"""The local file system, shared folders included.

stage     .NAME.partial-XXXX beside NAME
publish   nothing at NAME        one rename
          foreign files alone    ours are moved in, the manifest last
          a checkpoint           the two folders change places at once, foreign files follow, the old one goes
recover   a partial folder that was never published is deleted; of one that was exchanged, what is foreign goes
          home first; a checkpoint that was moved aside returns if nothing took its place
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, cast

from paceline.base.files import expanded
from paceline.checkpoint.store.direct import DurableFile, sync_folder
from paceline.checkpoint.store.lock import hold_local

_PARTIAL = ".partial-"
_ASIDE = ".aside-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class LocalStore:
    """A `Store` in folders of this machine, or of a file system that all hosts mount."""

    def serves(self, path: str) -> bool:
        """Every path without a scheme, and `file://`."""
        return "://" not in path or path.startswith("file://")

    def resolve(self, path: str) -> str:
        """Returns the absolute path. A link to a folder is resolved, since `publish` cannot exchange a link with a folder."""
        absolute = os.path.abspath(expanded(path.removeprefix("file://")))
        if os.path.islink(absolute):
            return os.path.realpath(absolute)
        return absolute

    def join(self, folder: str, *names: str) -> str:
        return os.path.join(folder, *names)

    def parent(self, path: str) -> tuple[str, str]:
        return os.path.split(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def list(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def files(self, folder: str) -> dict[str, int]:
        sizes = {}
        for name in _relative_files(folder):
            path = os.path.join(folder, name)
            if os.path.exists(path):  # a link may point to a file that is gone
                sizes[name.replace(os.sep, "/")] = os.path.getsize(path)
        return dict(sorted(sizes.items()))

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file; a written one is flushed to the disk when it is closed without an error."""
        if mode == "rb":
            return open(path, "rb")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return cast(BinaryIO, DurableFile(path))

    def remove(self, path: str) -> None:
        """Removes a file or a whole folder. A folder is renamed first, so that nobody finds half of it under its name."""
        if not os.path.isdir(path) or os.path.islink(path):
            os.remove(path)
            return
        folder, name = os.path.split(path)
        if not _leftover(name)[1]:
            going = _partial(folder, name)
            os.rename(path, going)
            path = going
        shutil.rmtree(path)

    def stage(self, path: str) -> str:
        """Makes `.NAME.partial-XXXX` beside `path`."""
        folder, name = os.path.split(path)
        staged = _partial(folder, name)
        os.makedirs(staged)
        return staged

    def publish(self, staged: str, path: str, *, last: str, replaces: Collection[str] | None) -> None:
        """Moves a staged folder to its place; the docstring of this module explains the three cases."""
        # The entries of the staged folders must be on the disk before the rename that makes them visible.
        _sync_tree(staged)
        if not os.path.lexists(path):
            os.rename(staged, path)
        elif replaces is None:
            _move_in(staged, path, last)
        else:
            # After an exchange the old checkpoint is at the path of the staged one.
            old = staged
            if not _exchange(staged, path):
                old = _put_aside(staged, path)
            _adopt(old, path, frozenset(replaces))
            shutil.rmtree(old)
        sync_folder(os.path.dirname(path))

    def recover(
        self,
        folder: str,
        mine: Callable[[str], bool],
        owned: Callable[[str], Collection[str] | None],
        *,
        clean: bool = True,
    ) -> None:
        """Cleans up after saves that did not end; see the docstring of this module."""
        for entry in self.list(folder):
            name, kind = _leftover(entry)
            if not kind or not mine(name):
                continue
            leftover = os.path.join(folder, entry)
            home = os.path.join(folder, name)
            if not _is_real_folder(leftover):
                # No save leaves a link or a file under such a name. The target of a link belongs to somebody else, so that
                # only the link is removed.
                if clean:
                    os.unlink(leftover)
                continue
            files = owned(leftover)
            # A crash between the two renames of `_put_aside` left no checkpoint under the name: the old one returns.
            if files is not None and kind == _ASIDE and not os.path.lexists(home):
                os.rename(leftover, home)
                continue
            if not clean:
                continue
            # A leftover with a manifest may be the old checkpoint after an exchange. Files of the user's in it move on.
            if files is not None and _is_real_folder(home):
                _adopt(leftover, home, frozenset(files))
            shutil.rmtree(leftover)

    def hold(self, folder: str, who: Mapping[str, str]) -> Callable[[], None]:
        """Takes a record lock on `.NAME.lock` beside the folder; see `lock.py`."""
        return hold_local(folder, who)


def _is_real_folder(path: str) -> bool:
    """Returns whether the path is a folder itself, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def _partial(folder: str, name: str) -> str:
    return os.path.join(folder, f".{name}{_PARTIAL}{secrets.token_hex(4)}")


def _leftover(entry: str) -> tuple[str, str]:
    """Returns the final name and the kind of a leftover; two empty strings for anything else."""
    for kind in (_PARTIAL, _ASIDE):
        name, mark, _ = entry.rpartition(kind)
        if mark and name.startswith("."):
            return name[1:], kind
    return "", ""


def _move_in(staged: str, path: str, last: str) -> None:
    """Moves files one by one; `last` follows when the others are on the disk, since it says that they are complete."""
    names = sorted(_relative_files(staged), key=lambda name: name == last)  # False sorts before True
    folders = {path}
    for name in names:
        target = os.path.join(path, name)
        if name == last:
            for folder in folders:
                sync_folder(folder)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(staged, name), target)
        folders.add(os.path.dirname(target))
    sync_folder(path)
    shutil.rmtree(staged)


def _relative_files(folder: str) -> list[str]:
    files = []
    for base, _, names in os.walk(folder):
        files += [os.path.relpath(os.path.join(base, name), folder) for name in names]
    return files


def _exchange(path: str, other: str) -> bool:
    """Exchanges two paths atomically; returns False if the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False  # this kernel, or this file system (NFS, for example), has no exchange
    raise OSError(number, os.strerror(number), other)


def _put_aside(staged: str, path: str) -> str:
    """Replaces a folder by two renames, for systems without an exchange; returns the path of the old folder.

    After a crash between the two renames, `recover` moves the old folder back.
    """
    aside = staged.replace(_PARTIAL, _ASIDE)
    os.rename(path, aside)
    os.rename(staged, path)
    return aside


def _adopt(old: str, new: str, owned: frozenset[str], below: str = "") -> None:
    """Moves files that are not `owned` from an old folder to the new one; it replaces nothing that the new one has."""
    for entry in os.listdir(old):
        name = f"{below}{entry}"
        source = os.path.join(old, entry)
        target = os.path.join(new, entry)
        if name in owned:
            continue
        if _is_real_folder(source) and _is_real_folder(target):
            _adopt(source, target, owned, f"{name}/")
        elif any(file.startswith(f"{name}/") for file in owned):
            # The checkpoint made this folder itself. It moves only if there is a file of the user's in it.
            os.makedirs(target, exist_ok=True)
            _adopt(source, target, owned, f"{name}/")
            if not os.listdir(target):
                os.rmdir(target)
        elif not os.path.lexists(target):
            os.rename(source, target)


def _sync_tree(folder: str) -> None:
    for base, _, _ in os.walk(folder):
        sync_folder(base)


STORE = LocalStore()
