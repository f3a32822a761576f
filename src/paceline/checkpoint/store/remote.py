"""Every URL that fsspec serves: s3://, gs://, az://, memory:// ...

Such stores have no rename, so that a save writes each time into a folder of its own, and the manifest, which is one object
and replaced at once, says which folder that is (`Manifest.within`). Till then the old one says where the old files are.

    RUN/checkpoints/checkpoint_7/manifest.json            last, in one request
    RUN/checkpoints/checkpoint_7/save-1f0c.../__0_0.distcp, .metadata, state.json ...
    RUN/checkpoints/.saving/checkpoint_7.save-1f0c...     while a save or a removal is under way

stage     the mark in `.saving`: also the first thing to fail where there are no credentials, no bucket, nobody there
publish   the manifest; then what it replaced is deleted, and the mark
recover   for each mark: folders of saves that the manifest does not name are deleted, uploads in parts are ended
remove    a mark, the manifest, the rest, the mark
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
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
        """URLs of every protocol that fsspec knows, but for files of this machine."""
        protocol = objects.scheme(path)
        return bool(protocol) and protocol not in _LOCAL and objects.is_known(protocol)

    def resolve(self, path: str) -> str:
        """The URL without slashes at its end."""
        return path.rstrip("/") if not path.endswith("://") else path

    def join(self, folder: str, *names: str) -> str:
        return "/".join([folder.rstrip("/"), *names])

    def parent(self, path: str) -> tuple[str, str]:
        """The prefix that holds `path`, and its name there; a bucket holds itself, under no name."""
        folder, _, name = self.resolve(path).rpartition("/")
        return (path, "") if folder.endswith(("://", ":/")) else (folder, name)

    def exists(self, path: str) -> bool:
        """Whether an object or a prefix lies at `path`; the place of a save is there from its mark on."""
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
        """Opens an object; a written one is there, durable, when it is closed without an error."""
        return open_reader(path) if mode == "rb" else cast(BinaryIO, Upload(path))

    def remove(self, path: str) -> None:
        """Removes an object or all of a prefix; of a checkpoint the manifest first.

        The place of a save stays once the manifest names it: a store may have taken the manifest and its answer be lost.
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
        """Marks that a save into `path` is under way, and names the folder in it that it writes."""
        save = f"save-{secrets.token_hex(8)}"
        objects.write(self._mark(path, save), b"")
        return self.join(path, save)

    def publish(self, staged: str, path: str, *, last: str, replaces: Collection[str] | None) -> None:
        """Writes the manifest; the files stay where they are."""
        save = self.parent(staged)[1]
        with self.open(self.join(staged, last), "rb") as file:
            manifest: dict[str, Any] = json.loads(file.read())
        # Leases of this process on the checkpoint or on the folder that holds it.
        for lease in list(self._leases.values()):
            if lease.is_mine() and lease.folder in (path, self.parent(path)[0]):
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
            # It is published: what is left over costs room, and the mark tells the next save.
            _log.warning("saved %s, but could not delete what it replaced: %s", path, error)

    def recover(
        self,
        folder: str,
        mine: Callable[[str], bool],
        owned: Callable[[str], Collection[str] | None],
        *,
        clean: bool = True,
    ) -> None:
        """Deletes what saves and removals that did not end have left; there is nothing that a reader would miss."""
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
        """A lease that this process renews, on the object `.NAME.lock` beside the folder; see `lease`."""
        home, name = self.parent(folder)
        key = self.join(home, f".{name}.lock")
        user = object()
        with self._guard:
            while True:
                lease = self._leases.get(key)
                if lease is None or not lease.is_mine():
                    lease = self._leases[key] = Lease(key, folder, who)
                lease.users.add(user)
                if self._leases.get(key) is lease:
                    break

        def release() -> None:
            # Without the guard: a saver may be collected on fsspec's own thread, for which the guard's owner may be waiting.
            if user not in lease.users or not lease.is_mine():
                return
            lease.users.discard(user)
            if not lease.users:
                if self._leases.get(key) is lease:
                    del self._leases[key]
                lease.release()

        return release

    def _mark(self, path: str, what: str) -> str:
        folder, name = self.parent(path)
        return self.join(folder, _MARKS, f"{name}.{what}")

    def _within(self, home: str) -> str | None:
        """Which save the manifest names, empty where it names none; None where there is no manifest."""
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
