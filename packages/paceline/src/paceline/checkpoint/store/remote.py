"""The store for every URL that fsspec serves: s3://, gs://, az://, memory:// ...

Such stores cannot rename. So each save writes into a new folder, and the manifest names that folder (`Manifest.within`). The
manifest is one object, which is replaced in one request. Until then, the old manifest names the old folder.

    RUN/checkpoints/checkpoint_7/manifest.json            written last, in one request
    RUN/checkpoints/checkpoint_7/save-1f0c.../__0_0.distcp, .metadata, state.json ...
    RUN/checkpoints/.saving/checkpoint_7.save-1f0c...     a mark, there while a save or a removal is under way

stage     writes the mark; this fails first if the credentials, the bucket or the network are missing
publish   writes the manifest; then deletes what it replaced, and the mark
recover   for each mark: deletes folders of saves that the manifest does not name, and aborts uploads in parts
remove    writes a mark; deletes the manifest, then the rest, then the mark
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, BinaryIO, cast

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.manifest import NAME, encoded
from paceline.checkpoint.store import objects
from paceline.checkpoint.store.lease import Lease
from paceline.checkpoint.store.remote_files import Upload, open_reader

_log = logging.getLogger("paceline.checkpoint")
_MARKS = ".saving"
_SAVE = re.compile(r"save-[0-9a-f]{16}")
_MARK = re.compile(r"(.*)\.(save-[0-9a-f]{16}|removing)")
_LOCAL = ("file", "local")


class RemoteStore:
    """A `Store` of objects behind a URL; a folder is a prefix of their names."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._guard = threading.Lock()

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
        if _SAVE.fullmatch(name) and self._within(home) == name:
            return
        mark = self._mark(home, name) if _SAVE.fullmatch(name) else self._mark(path, "removing")
        objects.write(mark, b"")
        objects.delete(self.join(path, NAME))
        objects.delete_all(path)
        objects.abort_uploads(path)
        objects.delete(mark)

    def stage(self, path: str) -> str:
        """Marks that a save into `path` is under way, and returns the folder that it writes."""
        save = f"save-{secrets.token_hex(8)}"
        objects.write(self._mark(path, save), b"")
        return self.join(path, save)

    def publish(self, staged: str, path: str, *, last: str, replaces: Collection[str] | None) -> None:
        """Writes the manifest; the files stay where they are."""
        save = self.parent(staged)[1]
        with self.open(self.join(staged, last), "rb") as file:
            manifest: dict[str, Any] = json.loads(file.read())
        # The lease may be on the checkpoint, or on the folder of all checkpoints.
        folders = (path, self.parent(path)[0])
        for lease in list(self._leases.values()):
            if lease.is_held() and lease.folder in folders:
                lease.check()
        with self.open(self.join(path, last), "wb") as out:
            out.write(encoded({**manifest, "within": save}))
        try:
            objects.delete(self.join(staged, last))
            for name in replaces or ():
                if name != last and not _SAVE.match(name):
                    objects.delete(self.join(path, name))
            self._sweep(path, save)
            objects.delete(self._mark(path, save))
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
            mark = _MARK.fullmatch(entry)
            if mark is None or not mine(mark[1]):
                continue
            home = self.join(folder, mark[1]) if mark[1] else folder
            try:
                within = self._within(home)
            except (ValueError, AttributeError):
                _log.warning("the manifest of %s is damaged: what an unfinished save left there stays", home)
                continue
            if within is None and mark[2] == "removing":
                objects.delete_all(home)
            self._sweep(home, within)
            objects.abort_uploads(home)
            objects.delete(self.join(folder, _MARKS, entry))

    def hold(self, folder: str, who: Mapping[str, str]) -> Callable[[], None]:
        """Takes a lease on the object `.NAME.lock` beside the folder; see `lease`."""
        home, name = self.parent(folder)
        key = self.join(home, f".{name}.lock")
        user = object()
        with self._guard:
            lease = self._leases.get(key)
            if lease is None or not lease.join(user):
                # The thread of a lease that has ended deletes the object, and must not delete that of the next lease.
                if lease is not None:
                    lease.release()
                lease = self._leases[key] = Lease(key, folder, who)
                lease.join(user)
        # The guard is not taken for it: the garbage collector may run it on the thread of fsspec, and the owner of the guard
        # may be waiting for that thread.
        return partial(lease.leave, user)

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

    def _sweep(self, home: str, keep: str | None) -> None:
        """Deletes the folders of all saves but one."""
        for name in self.list(home):
            if _SAVE.fullmatch(name) and name != keep:
                objects.delete_all(self.join(home, name))


STORE = RemoteStore()
