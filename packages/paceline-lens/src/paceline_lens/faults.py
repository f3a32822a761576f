"""Faults at a chosen rank, step and place: what a loop does when a process raises, dies, freezes or cannot save.

Faults at a step strike where the loop calls `at`. Those inside a save or a load strike in a `Store` that stands before
the real one once they are armed: nothing in the code that is tested knows of them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from paceline.base import env as environment
from paceline.checkpoint.format import manifest
from paceline.checkpoint.store import STORES, Store, store_for

Kind = Literal["raise", "exit", "kill", "stop", "sleep", "preempt", "kill-launcher", "disk-full", "forbidden"]
Place = Literal["step", "stage", "shard", "manifest", "publish", "published", "prune", "load"]
Damage = Literal["flip", "cut", "remove", "cut-manifest"]

_NAME = "0-faults"  # stores are asked in the order of their names
_SHARD = ".distcp"


class InjectedFault(RuntimeError):
    """Raised by a fault of kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank at one step, or within a save or a load.

    Attributes:
        kind: "raise" an error, "exit" with code 3, "kill" (SIGKILL, as the kernel does when memory runs out), "stop"
            (SIGSTOP: alive, silent), "sleep", "preempt" (SIGTERM to the launcher, as a scheduler does),
            "kill-launcher" (SIGKILL to it), and within a save or load "disk-full" or "forbidden": the error that the
            system would raise.
        rank: the rank that it strikes.
        step: the step at which it strikes, counted as the caller of `at` counts; at other places how often the place
            was passed before.
        seconds: how long "sleep" sleeps.
        once: a file that is made when it strikes; while it exists, the fault does not strike. So a run that is
            started again gets past it.
        place: "step"; or, once it is armed, in a save "stage" (before anything is written), "shard" (with a part of
            this rank's tensors written), "manifest" (every file written but that one), "publish" (all written, nothing
            in its place yet), "published"; "prune" (one file of an old checkpoint is gone), "load" (before a shard is
            read).
        after_s: strikes so much later, from a thread, wherever the process is by then: in a collective, or while a
            save is written in the background. For kinds that raise nothing.

    Example:
        >>> fault = Fault("kill", rank=1, step=3)
        >>> for step in range(10):
        ...     fault.at(step)
        >>> arm(Fault("kill", rank=0, step=1, place="manifest"))  # during the second save
    """

    kind: Kind
    rank: int
    step: int
    seconds: float = 60.0
    once: str | Path | None = None
    place: Place = "step"
    after_s: float = 0.0

    def __post_init__(self) -> None:
        if self.after_s and self.kind in ("raise", "disk-full", "forbidden"):
            raise ValueError(f"{self.kind!r} raises where it strikes, so that it cannot come later: leave out after_s")
        if self.place == "step" and self.kind in ("disk-full", "forbidden"):
            raise ValueError(f"{self.kind!r} is an error of a save or a load: say a place within one")

    def at(self, step: int, rank: int | None = None) -> None:
        """Strikes if this is the step and the rank (by default the one in RANK).

        Raises:
            InjectedFault: for the kind "raise".
        """
        if self.place == "step":
            self.reach("step", step, rank=rank)

    def reach(self, place: Place, number: int, path: str = "", rank: int | None = None) -> None:
        """Strikes if this is the place, the rank, and the number.

        Raises:
            InjectedFault: for the kind "raise".
            OSError: for "disk-full" and "forbidden".
        """
        if not self.due(place, number, rank):
            return
        if self.once is not None:
            Path(self.once).touch()
        if self.after_s:
            threading.Timer(self.after_s, self._strike, (place, path)).start()
        else:
            self._strike(place, path)

    def due(self, place: Place, number: int, rank: int | None = None) -> bool:
        """Returns whether it would strike here."""
        me = (environment.get("RANK") or 0) if rank is None else rank
        here = place == self.place and number == self.step and self.rank == me
        return here and not (self.once is not None and Path(self.once).exists())

    def _strike(self, place: str, path: str) -> None:
        if self.kind == "raise":
            where = f"at step {self.step}" if place == "step" else f"in a save or load, at {place!r}"
            raise InjectedFault(f"rank {self.rank} fails {where}, as the test wants")
        if self.kind == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.kind == "forbidden":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if self.kind in ("exit", "sleep"):
            os._exit(3) if self.kind == "exit" else time.sleep(self.seconds)
            return
        number, target = {
            "kill": (signal.SIGKILL, os.getpid()),
            "stop": (signal.SIGSTOP, os.getpid()),
            "preempt": (signal.SIGTERM, os.getppid()),
            "kill-launcher": (signal.SIGKILL, os.getppid()),
        }[self.kind]
        os.kill(target, number)


def arm(*faults: Fault) -> Callable[[], None]:
    """Lets faults strike within saves and loads of this process; returns what disarms them.

    Example:
        >>> disarm = arm(Fault("disk-full", rank=0, step=0, place="shard"))
        >>> accelerator.save_state()  # raises CheckpointError checkpoint-disk-full
        >>> disarm()
    """
    STORES.add(_NAME, _FaultyStore(faults))
    return lambda: STORES.remove(_NAME)


def damage(checkpoint: str | Path, how: Damage) -> str:
    """Damages a checkpoint on a disk as a bad disk or a cut copy would; returns the name of the file.

    Args:
        checkpoint: its folder.
        how: "flip" one bit in the middle of the largest file, "cut" that file in half, "remove" it, or
            "cut-manifest".
    """
    folder = Path(checkpoint)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    target = folder / manifest.NAME if how == "cut-manifest" else max(files, key=lambda path: path.stat().st_size)
    content = bytearray(target.read_bytes())
    if how == "remove":
        target.unlink()
    elif how == "flip":
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    else:
        target.write_bytes(content[: len(content) // 2])
    return target.relative_to(folder).as_posix()


class _FaultyStore:
    """Stands before every other store, and passes everything on."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._passed: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda path, *args, **options: getattr(self._behind(path), name)(path, *args, **options)

    def serves(self, path: str) -> bool:
        """Every path that another store serves."""
        return any(store is not self and store.serves(path) for store in STORES)

    def stage(self, path: str, *, fresh: bool = False) -> str:
        """A place to write into; `stage` is before it."""
        self._reach("stage", path)
        return self._behind(path).stage(path, fresh=fresh)

    def open(self, path: str, mode: str) -> BinaryIO:
        """A file; `shard` is within one that is written, `load` before one is read, `manifest` before that."""
        behind = self._behind(path)
        if path.endswith(_SHARD) and mode == "rb":
            self._reach("load", path)
        if path.endswith(f"/{manifest.NAME}") and mode == "wb":
            self._reach("manifest", path)
        file = behind.open(path, mode)
        if path.endswith(_SHARD) and mode == "wb":
            return _TornShard(file, lambda: self._reach("shard", path))  # type: ignore[return-value]
        return file

    def publish(self, staged: str, path: str, *, last: str, owned: Callable[[str], Collection[str] | None]) -> None:
        """Puts a folder in its place; `publish` is before, `published` after it."""
        self._reach("publish", path)
        self._behind(path).publish(staged, path, last=last, owned=owned)
        self._reach("published", path)

    def remove(self, path: str) -> None:
        """Removes; `prune` is after the first file of a checkpoint."""
        behind = self._behind(path)
        if behind.parent(path)[1].startswith(".") or not behind.folder(path):
            behind.remove(path)  # what a save left, which is no checkpoint
            return
        unlink = os.unlink

        def first(target: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, dir_fd: int | None = None) -> None:
            os.unlink = unlink
            unlink(target, dir_fd=dir_fd)
            self._reach("prune", path)

        os.unlink = cast(Any, first)
        try:
            behind.remove(path)
        finally:
            os.unlink = unlink

    def _reach(self, place: Place, path: str) -> None:
        number = self._passed.get(place, 0)
        self._passed[place] = number + 1
        for fault in self._faults:
            fault.reach(place, number, path)

    def _behind(self, path: str) -> Store:
        for store in STORES:
            if store is not self and store.serves(path):
                return store  # type: ignore[no-any-return]
        return store_for(path)  # raises


class _TornShard:
    """A file in whose middle something happens: after the first bytes."""

    def __init__(self, file: BinaryIO, then: Callable[[], None]) -> None:
        self._file, self._then = file, then
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _TornShard:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._file.__exit__(*raised)

    def write(self, data: Any) -> int:
        """Writes, and the first time calls what is to happen once the bytes are on their way to the disk."""
        count = self._file.write(data)
        if not self._begun:
            self._begun = True
            with suppress(OSError):
                self._file.flush()
            self._then()
        return count
