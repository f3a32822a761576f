"""The local file system, shared folders included.

stage     .NAME.partial-XXXX beside NAME; for an automatic name .NAME.partial, a folder that must not exist yet
publish   nothing at NAME        one rename
          something at NAME      the two folders change places at once, foreign files follow, the old one goes
merge     for files that lie among others: one rename, or where NAME exists, one to .NAME.merging and one for each file
recover   a partial folder that nobody writes any more is deleted; of one that was exchanged, what is foreign goes
          home first; a folder that was moved aside returns if nothing took its place; a merge is brought to its end

A partial folder contains the claim of its save (`claim`), which goes once the folder has its name. So one without a claim
was exchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection
from typing import BinaryIO, cast

from paceline.base.files import expanded
from paceline.checkpoint.store import claim
from paceline.checkpoint.store.direct import DurableFile, sync_folder

_PARTIAL = "partial"
_ASIDE = "aside"
_MERGING = "merging"
_LEFTOVER = re.compile(rf"\.(.+)\.({_PARTIAL}|{_ASIDE}|{_MERGING})(?:-[0-9a-f]+)?")
_CLAIM = ".paceline-claim"
# A folder is younger than this while its claim is written, and while another run moves foreign files out of it.
_GAP_S = 60.0
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
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
        return sorted(_entries(folder)) if os.path.isdir(folder) else []

    def files(self, folder: str) -> dict[str, int]:
        sizes = {}
        for name in _relative_files(folder):
            path = os.path.join(folder, name)
            if name != _CLAIM:
                with contextlib.suppress(
                    FileNotFoundError
                ):  # a link to a file that is gone; or another run has removed it
                    sizes[name.replace(os.sep, "/")] = os.path.getsize(path)
        return dict(sorted(sizes.items()))

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file; a written one is flushed to the disk when it is closed without an error."""
        if mode == "rb":
            return open(path, "rb")
        folder = os.path.dirname(path)
        # The folder of a save that was cleaned away must not come back with a part of its files.
        if not any(_LEFTOVER.fullmatch(name) for name in folder.split(os.sep)):
            os.makedirs(folder, exist_ok=True)
        return cast(BinaryIO, DurableFile(path))

    def remove(self, path: str) -> None:
        """Removes a file or a whole folder. A folder is renamed first, so that nobody finds half of it under its name."""
        if not os.path.isdir(path) or os.path.islink(path):
            os.remove(path)
            return
        claim.end(path)
        if _LEFTOVER.fullmatch(os.path.basename(path)):
            _remove_tree(path)
            return
        going = _beside(path, _PARTIAL)
        os.rename(path, going)
        # If this process is killed now, the next save knows whose folder it is. A full disk is no reason not to remove it.
        with contextlib.suppress(OSError), open(os.path.join(going, _CLAIM), "wb") as file:
            file.write(claim.begin(going))
        _remove_tree(going)
        claim.end(going)

    def stage(self, path: str, *, fresh: bool = False) -> str:
        """Makes a partial folder beside `path`, and writes the claim into it."""
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        staged = os.path.join(folder, f".{name}.{_PARTIAL}") if fresh else _beside(path, _PARTIAL)
        try:
            os.mkdir(staged)
        except FileExistsError:
            raise claim.NameTakenError(path) from None
        # The run that had the name before may have published since this one looked. While it had the name, `mkdir` failed.
        if fresh and os.path.lexists(path):
            os.rmdir(staged)
            raise claim.NameTakenError(path)
        _claim(staged)
        return staged

    def publish(self, staged: str, path: str, *, last: str, owned: Callable[[str], Collection[str] | None]) -> None:
        """Moves a staged folder to its place; the docstring of this module explains the cases."""
        # The entries of the staged folders must be on the disk before the rename that makes them visible.
        _sync_tree(staged)
        for old in _take_place(staged, path):
            _clear(old, path, owned(old))
        with contextlib.suppress(FileNotFoundError):  # another run has replaced the whole folder
            os.unlink(os.path.join(path, _CLAIM))
        claim.end(staged)
        sync_folder(os.path.dirname(path))

    def merge(self, staged: str, path: str, *, owned: Callable[[str], Collection[str] | None]) -> None:
        """Moves a staged folder to its place, if nothing is there; else its files, in place of the `owned` ones there."""
        _sync_tree(staged)
        try:
            os.rename(staged, path)
        except OSError:
            if not os.path.isdir(path):  # also a link to a folder
                raise
            folder, name = os.path.split(path)
            merging = os.path.join(folder, f".{name}.{_MERGING}")
            # One merge at a time. From here on whoever finds the folder, also a save at the same time, brings it to its end.
            while not _renamed(staged, merging):
                _finish_merge(merging, path, owned)
            _finish_merge(merging, path, owned)
            sync_folder(path)
        with contextlib.suppress(FileNotFoundError):  # the files were moved without it
            os.unlink(os.path.join(path, _CLAIM))
        claim.end(staged)
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
        try:
            entries = self.list(folder)
        except PermissionError:
            if clean:
                raise
            return  # who may not list a folder has saved nothing there
        for entry in entries:
            match = _LEFTOVER.fullmatch(entry)
            if match is None or not mine(match[1]):
                continue
            leftover = os.path.join(folder, entry)
            home = os.path.join(folder, match[1])
            if not _is_real_folder(leftover):
                # No save leaves a link or a file under such a name. The target of a link belongs to somebody else, so that
                # only the link is removed.
                if clean and os.path.lexists(leftover):
                    os.unlink(leftover)
                continue
            # A crash between the two renames of `_take_place` left nothing under the name: the old folder returns. If that run
            # lives, it finds this folder in its way, and moves it again.
            if match[2] == _ASIDE and not os.path.lexists(home):
                try:
                    os.rename(leftover, home)
                except (
                    OSError
                ) as error:  # that run has gone on meanwhile: the old folder is gone, or a new one is there
                    if error.errno not in (*_TAKEN, errno.ENOENT):
                        raise
                continue
            if match[2] == _MERGING and os.path.isdir(home):
                _finish_merge(leftover, home, owned)
                continue
            if not clean:
                continue
            files = owned(leftover)
            who = _claim_in(leftover)
            if who is None:
                # It was exchanged, or its claim was not written yet. With files, but neither a manifest nor a successor, nobody
                # knows what it is.
                is_empty = set(_entries(leftover)) <= {_CLAIM}
                known = files is not None or is_empty or _is_real_folder(home)
                limit = _GAP_S if known else claim.ABANDONED_S
                is_abandoned = _age_s(leftover) > limit
            else:
                is_abandoned = claim.is_abandoned(leftover, who)
            if not is_abandoned:
                continue
            if who is not None and files is None:
                # It was never published, so all of its files are ours.
                _remove_tree(leftover)
            else:
                _clear(leftover, home, files)


def _is_real_folder(path: str) -> bool:
    """Returns whether the path is a folder itself, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def _beside(path: str, kind: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{kind}-{secrets.token_hex(4)}")


def _claim(staged: str) -> None:
    """Writes the claim into a new folder, which goes again if there is no room for it."""
    try:
        with open(os.path.join(staged, _CLAIM), "wb") as file:
            file.write(claim.begin(staged))
    except OSError:  # a full disk
        shutil.rmtree(staged)
        raise


def _claim_in(folder: str) -> dict[str, str] | None:
    """Returns the claim in a partial folder; None if there is none, or if it is not written yet."""
    try:
        with open(os.path.join(folder, _CLAIM), "rb") as file:
            return claim.decoded(file.read()) or None
    except FileNotFoundError:
        return None


def _age_s(folder: str) -> float:
    """Returns the seconds since something was last created or removed in a folder; 0 if the folder is gone."""
    try:
        return time.time() - os.lstat(folder).st_mtime
    except FileNotFoundError:
        return 0.0


def _take_place(new: str, path: str) -> list[str]:
    """Moves a folder to its final path, whatever another run does there; returns the folders that were moved away.

    Without an exchange, a crash between the two renames leaves nothing under the name until `recover` moves the old one back.
    """
    replaced: list[str] = []
    while True:
        try:
            os.rename(new, path)
            return replaced
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        # Another run may move away what is there, at any moment: then it is tried again.
        with contextlib.suppress(FileNotFoundError):
            if _exchange(new, path):
                return [*replaced, new]
            aside = _beside(path, _ASIDE)
            os.rename(path, aside)
            replaced.append(aside)


def _clear(old: str, home: str, files: Collection[str] | None) -> None:
    """Moves what is not of the checkpoint from an old folder to its successor, if there is one, and removes the old one."""
    if _is_real_folder(home):
        _adopt(old, home, frozenset(files or ()) | {_CLAIM})
    _remove_tree(old)


def _finish_merge(merging: str, home: str, owned: Callable[[str], Collection[str] | None]) -> None:
    """Moves the files of a complete save into a folder, and those of the save before out of it. Several may do it at once.

    Files go out of and into the open folder, and not by its path: once this merge has ended, the next one has the same path,
    and a process that was suspended here must not touch its files.
    """
    try:
        opened = os.open(merging, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # another process has brought it to its end
        return
    try:
        files = owned(merging)
        if (
            files is not None
        ):  # else that file has moved already by which the owner is known, and what was older is gone
            for name in set(owned(home) or ()) - set(files):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(home, name), f"{_CLAIM}-{secrets.token_hex(4)}", dst_dir_fd=opened)
        _move_files(opened, home)
    except OSError:
        _remove_tree(merging)
        raise
    finally:
        os.close(opened)
    _remove_emptied(merging)


def _renamed(source: str, target: str) -> bool:
    """Renames a folder, unless there is one with files at the target."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def _remove_emptied(folder: str) -> None:
    """Removes what is left of a folder whose files were moved. By now another save may have files under its name."""
    for entry in _entries(folder):
        path = os.path.join(folder, entry)
        if _is_real_folder(path):
            _remove_emptied(path)
        elif entry.startswith(_CLAIM):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (*_TAKEN, errno.ENOENT):
            raise


def _move_files(source: int, target: str) -> None:
    """Moves the files of a save from an open folder to another one. A folder of the same name gets those of its own."""
    with os.scandir(source) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        place = os.path.join(target, entry.name)
        if entry.name.startswith(_CLAIM):  # or what was older
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                os.makedirs(place, exist_ok=True)
                inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=source)
                try:
                    _move_files(inner, place)
                finally:
                    os.close(inner)
            else:
                os.replace(entry.name, place, src_dir_fd=source)
        except FileNotFoundError:
            if entry.name in os.listdir(source):  # not moved by another process, but the target is gone
                raise


def _remove_tree(folder: str) -> None:
    """Removes a folder, which another run may be removing at the same time."""
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            # The claim goes last: if this process is killed now, the next save knows what the rest is.
            for entry in _entries(folder):
                path = os.path.join(folder, entry)
                if _is_real_folder(path):
                    shutil.rmtree(path)
                elif entry != _CLAIM:
                    os.unlink(path)
            shutil.rmtree(folder)


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


def _adopt(old: str, new: str, owned: frozenset[str], below: str = "") -> None:
    """Moves files that are not `owned` from an old folder to the new one; it replaces nothing that the new one has."""
    for entry in _entries(old):
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
            with contextlib.suppress(FileNotFoundError):  # another run has moved it
                os.rename(source, target)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # another run has removed the folder
        return []


def _sync_tree(folder: str) -> None:
    for base, _, _ in os.walk(folder):
        sync_folder(base)


STORE = LocalStore()
