"""The store for every URL that fsspec serves: s3://, gs://, az://, memory:// ...

Such stores cannot rename. So each save writes into a new folder, and the manifest names that folder (`Manifest.within`). The
manifest is one object, which is replaced in one request. Until then, the old manifest names the old folder.

    RUN/checkpoints/checkpoint_7/manifest.json            written last, in one request
    RUN/checkpoints/checkpoint_7/save-1f0c.../__0_0.distcp, .metadata, state.json ...
    RUN/checkpoints/.saving/checkpoint_7.save-1f0c...     a mark, there while a save is under way
    RUN/checkpoints/.saving/checkpoint_7.taken            another one, if the name is an automatic one

stage     writes the marks; this fails first if the credentials, the bucket or the network are missing
publish   writes the manifest; then deletes what it replaced, and the marks
recover   for each mark that is abandoned: deletes the folder of its save, and aborts its uploads in parts
remove    writes a mark; deletes the manifest, then the rest, then the mark

A mark contains the claim of its writer (`claim`). An automatic name is taken by a mark that is written on the condition that
there is none. S3 and most others keep this condition; where a store ignores it, `publish` finds the other run's mark.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any, BinaryIO, cast

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.manifest import NAME, encoded
from paceline.checkpoint.store import claim
from paceline_hosts.stores import objects
from paceline_hosts.stores.remote_files import Upload, open_reader

_log = logging.getLogger("paceline.checkpoint")
_MARKS = ".saving"
_SAVE = re.compile(r"save-[0-9a-f]{16}")
_TAKEN = "taken"
_MARK = re.compile(rf"(.*)\.(save-[0-9a-f]{{16}}|removing|{_TAKEN})")
_LOCAL = ("file", "local")


class RemoteStore:
    """A `Store` of objects behind a URL; a folder is a prefix of their names."""

    def __init__(self) -> None:
        # The mark by which the automatic name is taken, and its content, by the folder of the save.
        self._taken: dict[str, tuple[str, bytes]] = {}

    def serves(self, path: str) -> bool:
        """Returns whether `path` is a URL of a protocol that fsspec knows, except those for files of this machine."""
        protocol = objects.scheme(path)
        return bool(protocol) and protocol not in _LOCAL and objects.is_known(protocol)

    def resolve(self, path: str) -> str:
        """Returns the URL without slashes at its end."""
        return path.rstrip("/") if not path.endswith("://") else path

    def join(self, folder: str, *names: str) -> str:
        return "/".join([folder.rstrip("/"), *names])

    def parent(self, path: str) -> tuple[str, str]:
        """Returns the prefix of `path`, and its name there; of a bucket, the bucket itself and ""."""
        folder, _, name = self.resolve(path).rpartition("/")
        is_bucket = folder.endswith(("://", ":/"))
        return (path, "") if is_bucket else (folder, name)

    def exists(self, path: str) -> bool:
        """Returns whether `path` is an object or a prefix. The folder of a save exists as soon as its mark does."""
        if objects.kind(path):
            return True
        home, name = self.parent(path)
        return _SAVE.fullmatch(name) is not None and bool(objects.kind(self._mark(home, name)))

    def folder(self, path: str) -> bool:
        return objects.kind(path) == "directory"

    def list(self, folder: str) -> list[str]:
        return objects.names(folder)

    def files(self, folder: str) -> dict[str, int]:
        return objects.sizes(folder)

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens an object. A written object exists, and is durable, once it is closed without an error."""
        if mode == "rb" and self.parent(path)[1] == NAME:
            # It may be replaced while it is read, which must not give the begin of the one and the end of the other.
            content = objects.read(path)
            if content is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return io.BytesIO(content)
        return open_reader(path) if mode == "rb" else cast(BinaryIO, Upload(path))

    def remove(self, path: str) -> None:
        """Removes an object, or all objects of a prefix; of a checkpoint, the manifest is removed first.

        The folder of a save is not removed once the manifest names it: the store may have written the manifest although its
        answer was lost.
        """
        if objects.kind(path) == "file":
            objects.delete(path)
            return
        home, name = self.parent(path)
        claim.end(path)
        if _SAVE.fullmatch(name) and self._within(home) == name:
            return
        mark = self._mark(home, name) if _SAVE.fullmatch(name) else self._mark(path, "removing")
        try:
            objects.write(mark, claim.begin(path))
            objects.delete(self.join(path, NAME))
            objects.delete_all(path)
            objects.abort_uploads(path)
            self._give_back(path)
            objects.delete(mark)
        finally:
            claim.end(path)

    def stage(self, path: str, *, fresh: bool = False) -> str:
        """Marks that a save into `path` is under way, and returns the folder that it writes."""
        save = f"save-{secrets.token_hex(8)}"
        staged = self.join(path, save)
        if fresh:
            taken = self._mark(path, _TAKEN)
            content = claim.begin(staged, save=save)
            if not objects.write(taken, content, create=True):
                raise claim.NameTakenError(path)
            self._taken[staged] = taken, content
            # The run that had the name before may have published since this one looked.
            if objects.kind(path):
                self._give_back(staged)
                raise claim.NameTakenError(path)
        objects.write(self._mark(path, save), claim.begin(staged))
        return staged

    def publish(self, staged: str, path: str, *, last: str, owned: Callable[[str], Collection[str] | None]) -> None:
        """Writes the manifest; the files stay where they are.

        Raises:
            CheckpointError: `checkpoint-store-failed`, if the store has let another run take the same automatic name.
        """
        save = self.parent(staged)[1]
        with self.open(self.join(staged, last), "rb") as file:
            manifest: dict[str, Any] = json.loads(file.read())
        replaced = owned(path) or ()
        if staged in self._taken:
            taken, content = self._taken[staged]
            if objects.read(taken) != content:
                raise CheckpointError(
                    "checkpoint-store-failed",
                    f"two runs have taken the name {path} at the same moment.",
                    why="this store ignores the condition that an object must not exist yet",
                    fix="give each run its own `project_dir`",
                )
        with self.open(self.join(path, last), "wb") as out:
            out.write(encoded({**manifest, "within": save}))
        try:
            objects.delete(self.join(staged, last))
            for name in replaced:
                if name != last and not _SAVE.match(name):
                    objects.delete(self.join(path, name))
            self._sweep(path)
            self._give_back(staged)
            objects.delete(self._mark(path, save))
            claim.end(staged)
        except CheckpointError as error:
            # The checkpoint is published. What is left only uses space, and the next save finds the mark and cleans up.
            _log.warning("saved %s, but could not delete what it replaced: %s", path, error)

    def recover(
        self,
        folder: str,
        mine: Callable[[str], bool],
        owned: Callable[[str], Collection[str] | None],
        *,
        clean: bool = True,
    ) -> None:
        """Deletes what interrupted saves and removals have left. Nothing has to be finished, so a reader does nothing."""
        if not clean:
            return
        for entry in self.list(self.join(folder, _MARKS)):
            match = _MARK.fullmatch(entry)
            if match is None or not mine(match[1]):
                continue
            mark = self.join(folder, _MARKS, entry)
            try:
                with self.open(mark, "rb") as file:
                    who = claim.decoded(file.read())
            except FileNotFoundError:  # that save has ended since
                continue
            home = self.join(folder, match[1]) if match[1] else folder
            written = home if match[2] == "removing" else self.join(home, who.get("save", match[2]))
            if not claim.is_abandoned(written, who):
                continue
            try:
                within = self._within(home)
            except (ValueError, AttributeError):
                _log.warning("the manifest of %s is damaged: what an unfinished save left there stays", home)
                continue
            if match[2] == "removing":
                if within is None:
                    objects.delete_all(home)
            elif match[2] != _TAKEN and within != match[2]:
                objects.delete_all(self.join(home, match[2]))
                objects.abort_uploads(self.join(home, match[2]))
            objects.delete(mark)
            # The save may have been killed between its manifest and the removal of what that replaced.
            self._sweep(home)

    def _mark(self, path: str, what: str) -> str:
        folder, name = self.parent(path)
        return self.join(folder, _MARKS, f"{name}.{what}")

    def _within(self, home: str) -> str | None:
        """Returns the folder that the manifest names, or "" if it names none; None if there is no manifest."""
        try:
            with self.open(self.join(home, NAME), "rb") as file:
                return str(json.loads(file.read()).get("within", ""))
        except FileNotFoundError:
            return None

    def _give_back(self, staged: str) -> None:
        """Frees the automatic name that a save has taken, if it has taken one."""
        if staged in self._taken:
            taken, _ = self._taken.pop(staged)
            objects.delete(taken)

    def _sweep(self, home: str) -> None:
        """Deletes the folders of saves that neither the manifest names nor a mark."""
        # The order matters, since another run may be saving here. It writes its mark before its first file, and its manifest
        # before it deletes the mark.
        saves = [name for name in self.list(home) if _SAVE.fullmatch(name)]
        folder, name = self.parent(home)
        marks = self.list(self.join(folder, _MARKS))
        within = self._within(home)
        for save in saves:
            if save != within and f"{name}.{save}" not in marks:
                objects.delete_all(self.join(home, save))


STORE = RemoteStore()
