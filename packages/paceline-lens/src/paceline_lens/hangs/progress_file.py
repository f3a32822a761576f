"""`ProgressFile` writes once a second whether this rank makes progress, into a file beside those of its stacks.

    under `paceline launch`   the launcher reads the file, and decides whether the run is stuck
    under torchrun            the first rank of a host does the same, and reports their stacks

With several hosts, a rank that has made no progress for half of its limit asks over the store whether another rank is alive.
Before that, nothing is sent.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.log import logger
from paceline.world.stacks import dump
from paceline.world.world import World
from paceline_lens.hangs.folders import folder_of_launcher, folder_under_torchrun
from paceline_lens.hangs.host import HostWatch, report
from paceline_lens.hangs.progress import LOOK_S, Look, Progress, ProgressReport
from paceline_lens.hangs.watcher import Watcher, duty, running
from paceline_lens.torch_internals.flight_recorder import last_collectives

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_COLLECTIVES = 5
_COLLECTIVES_AFTER_S = 3.0  # a rank that has been still for so long also writes its last collectives
_ASKED, _ALIVE = "progress/asked", "progress/alive"
_ANSWERS_S = 10.0  # a rank that is alive answers within this time
_CHECK_S = 5.0  # seconds between two requests to the store


def watch(world: World, stuck_after: str, computes_on_cpu: bool) -> ProgressFile | None:
    """Starts to write the file of this process, until it leaves its group; None if nobody would read it.

    Args:
        world: this process, after it has joined its group.
        stuck_after: the setting `stuck_after`.
        computes_on_cpu: whether a busy process computes. With an accelerator, a busy process may only be waiting.
    """
    folder = folder_of_launcher() or folder_under_torchrun()
    if folder is None or stuck_after == "0":
        return None
    file = duty(ProgressFile)
    if file is None:
        watcher = running(computes_on_cpu)
        file = ProgressFile(watcher, folder, world, Progress(stuck_after))
        watcher.add(file, file.progress)
    return file


class OtherRanks:
    """Asks over the store whether any rank of any host is alive. Once a rank asks, each living rank increments a number."""

    def __init__(self) -> None:
        self._count = -1
        self._counted_at = 0.0

    def are_alive(self, store: Store, is_still: bool, now: float) -> bool:
        """Returns whether another rank may be alive. It must be called every `_CHECK_S` seconds.

        Args:
            store: the store.
            is_still: whether this rank has been still for so long that it asks.
            now: seconds of a monotonic clock.

        Raises:
            RuntimeError: the store has ended.
        """
        if not is_still:
            self._count = -1
            if store.check([_ASKED]):
                store.add(_ALIVE, 1)
            return True
        if self._count < 0:
            store.set(_ASKED, "1")
        count = store.add(_ALIVE, 0)
        if count != self._count:
            self._count = count
            self._counted_at = now
        return now - self._counted_at < _ANSWERS_S


class ProgressFile:
    """Is the duty of one process.

    Args:
        watcher: the watcher of this process.
        folder: the folder that the ranks of this host share.
        world: this process.
        progress: follows its main thread.
    """

    def __init__(self, watcher: Watcher, folder: Path, world: World, progress: Progress) -> None:
        self.look_s = LOOK_S
        self.progress = progress
        self._watcher = watcher
        self._world = world
        self._files = dump.DumpFiles(folder, os.getpid())
        self._has_launcher = folder_of_launcher() is not None
        self._others = OtherRanks()
        self._others_alive = world.nodes > 1
        self._written_at = self._checked_at = 0.0
        self._host = HostWatch(folder)
        self._write()

    def look(self, look: Look, progress: Progress) -> None:
        """Writes the file, and does what else is due."""
        # Another duty may want looks more often.
        if look.at - self._written_at < 0.9 * LOOK_S:
            return
        self._written_at = look.at
        try:
            # This comes before any request to the store, which does not return if rank 0 is stopped.
            self._write()
        except OSError:
            return  # the launcher has ended, and its folder with it
        if self._world.nodes > 1 and look.at - self._checked_at >= _CHECK_S:
            self._checked_at = look.at
            is_still = 0 < progress.limit_s < 2 * progress.still_s
            with suppress(RuntimeError):  # the store has ended, and with it rank 0 or the launcher
                store = self._watcher.store()
                if store is not None:
                    self._others_alive = self._others.are_alive(store, is_still, look.at)
        if not self._has_launcher:
            self._report_if_due()

    def close(self, why: str) -> None:
        """Removes the file. After this the process does not count as stuck, however long it runs."""
        self._files.progress.unlink(missing_ok=True)
        if not self._has_launcher:
            dump.leave(self._files)

    def _write(self) -> None:
        """Replaces the file at once, so a reader gets the old or the new text."""
        progress = self.progress
        collectives = last_collectives(_COLLECTIVES) if progress.still_s > _COLLECTIVES_AFTER_S else []
        written = ProgressReport(
            self._world.rank,
            progress.steps,
            progress.still_s,
            progress.limit_s,
            progress.usual_s,
            progress.busy_with,
            self._others_alive,
            tuple(collectives),
        )
        new = self._files.progress.with_suffix(".new")
        new.write_text(json.dumps(asdict(written)))
        new.replace(self._files.progress)

    def _report_if_due(self) -> None:
        """Under torchrun: reports the ranks of this host, if this rank is the first of them that can."""
        pid_of_rank = self._host.ranks()
        headline = self._host.due(list(pid_of_rank.values()), are_all=len(pid_of_rank) == self._world.local_size)
        if headline and self._host.first_at_work(pid_of_rank) == self._world.rank:
            places = self._host.places(pid_of_rank)
            text, _ = report(places, headline, Path())
            logger("world").warning("%s", text)
            # Ranks that have got the signal meanwhile are in this report.
            self._host.was_asked(pid_of_rank.values())
