"""The thread by which a rank says once a second whether it makes progress, in a file beside those of its stacks.

    under `paceline launch`   the launcher reads it, and decides
    under torchrun            a rank that gets SIGUSR1, or finds that no rank of its host makes progress, collects the stacks
                              of these ranks itself

The loop does not know of it, but for one call a step. Where there are several hosts and this rank has made no progress for
half its limit, it asks over the store whether another is alive: until then nothing is sent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.base.log import logger
from paceline.torch_internals.flight_recorder import last_collectives
from paceline.world import rendezvous
from paceline.world.hangs.progress import Look, Progress, ProgressReport
from paceline.world.places import line_of
from paceline.world.stacks import dump, procfs
from paceline.world.stacks.parse import Frame
from paceline.world.stacks.watch import LOOK_S, HostWatch, report_on
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_COLLECTIVES = 5
_COLLECTIVES_AFTER_S = 3.0  # a rank that has been still for so long writes down its last collectives
_ASKED, _ALIVE = "progress/asked", "progress/alive"
_ANSWERS_S = 10.0  # within this time a rank that is alive has said so
_CHECK_S = 5.0  # seconds between two questions to the store

# What may take long without a step, by files and functions of the main thread's stack.
_BUSY_FILES = {
    f"{os.sep}paceline{os.sep}checkpoint{os.sep}": "saving or loading a checkpoint",
    f"{os.sep}torch{os.sep}distributed{os.sep}checkpoint{os.sep}": "saving or loading a checkpoint",
    f"{os.sep}torch{os.sep}serialization.py": "saving or loading a file",
    f"{os.sep}torch{os.sep}_dynamo{os.sep}convert_frame.py": "compiling",
    f"{os.sep}torch{os.sep}_inductor{os.sep}compile_fx.py": "compiling",
    f"{os.sep}torch{os.sep}_inductor{os.sep}async_compile.py": "compiling",
    f"{os.sep}pdb.py": "a debugger",
    f"{os.sep}bdb.py": "a debugger",
    f"{os.sep}debugpy{os.sep}": "a debugger",
    f"{os.sep}pydevd": "a debugger",
}
_ONE_FIRST = ("main_process_first", "local_main_process_first")


def watch(world: World, stuck_after: str, computes_on_cpu: bool) -> ProgressThread | None:
    """Begins to write down the progress of this process, until it leaves its group; None where nobody would read it.

    Args:
        world: who this process is; its group is up.
        stuck_after: the setting.
        computes_on_cpu: whether a process that is busy computes; beside an accelerator it may just as well wait busily.
    """
    folder = dump.folder_of_launcher() or dump.folder_under_torchrun()
    if folder is None or stuck_after == "0":
        return None
    thread = rendezvous.companion_of(ProgressThread)
    if thread is None or not thread.alive:
        thread = ProgressThread(folder, world, stuck_after, computes_on_cpu)
        rendezvous.accompany(thread)
    return thread


def busy_with(frames: list[Frame]) -> str:
    """What a thread is in that may take long without a step; "" for nothing of that kind."""
    for frame in frames:
        for part, name in _BUSY_FILES.items():
            if part in frame.file:
                return name
        if frame.function in _ONE_FIRST:
            return "waiting for the one process that works first"
    return ""


class OtherRanks:
    """Whether any rank of any host is alive, over the store: who is alive counts a number up, once somebody asks.

    Args:
        store: over a connection of its own, as the main thread may wait with another in its hands.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = -1
        self._counted_at = 0.0

    def are_alive(self, is_still: bool, now: float) -> bool:
        """Whether another rank may be alive; to be called every `_CHECK_S` seconds.

        Args:
            is_still: whether this rank has been still for so long that it wants to know.
            now: seconds of a clock that only goes forward.

        Raises:
            RuntimeError: the store has ended.
        """
        if not is_still:
            self._count = -1
            if self._store.check([_ASKED]):
                self._store.add(_ALIVE, 1)
            return True
        if self._count < 0:
            self._store.set(_ASKED, "1")
        count = self._store.add(_ALIVE, 0)
        if count != self._count:
            self._count = count
            self._counted_at = now
        return now - self._counted_at < _ANSWERS_S


class ProgressThread:
    """The thread of one process.

    Args:
        folder: that the ranks of this host share.
        world, stuck_after, computes_on_cpu: as of `watch`.
    """

    def __init__(self, folder: Path, world: World, stuck_after: str, computes_on_cpu: bool) -> None:
        self._world = world
        self._computes_on_cpu = computes_on_cpu
        self._pid = os.getpid()
        self._files = dump.Files(folder, self._pid)
        self._has_launcher = dump.folder_of_launcher() is not None
        self._progress = Progress(stuck_after, LOOK_S)
        self._main = threading.main_thread()
        self._others: OtherRanks | None = None
        self._checked_at = 0.0
        self._others_alive = world.nodes > 1
        self._host = HostWatch(folder)
        self._is_reported = False  # this standstill
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="paceline-progress", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it watches this process."""
        return self._pid == os.getpid() and not self._stop.is_set()

    def stepped(self) -> None:
        """An optimizer of this process steps."""
        self._progress.stepped(time.monotonic())

    def close(self, why: str) -> None:
        """Ends the thread; from now on this process does not count as stuck, however long it still runs."""
        self._stop.set()
        self._thread.join(LOOK_S)
        self._files.progress.unlink(missing_ok=True)
        if not self._has_launcher:
            dump.leave(self._files)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look()
            try:
                # Before the store is touched: where rank 0 is stopped, that call does not come back.
                self._write()
            except OSError:
                return  # the launcher has ended, and its folder with it
            if self._world.nodes > 1:
                self._ask_others()
            if not self._has_launcher:
                self._report_if_due()

    def _look(self) -> None:
        assert self._main.ident is not None, "the main thread has begun"
        frame: FrameType | None = sys._current_frames()[self._main.ident]
        frames: list[Frame] = []
        places: list[tuple[int, int]] = []
        while frame is not None:
            frames.append(Frame(frame.f_code.co_filename, line_of(frame), frame.f_code.co_name))
            places.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        # Where the script has called a library, the library may poll: a loader looks every 5 s whether its workers live.
        outside = next((index for index, frame in enumerate(frames) if frame.is_script), 0)
        self._progress.look(
            Look(
                time.monotonic(),
                tuple(places[outside:]),
                self._cpu_s(),
                procfs.switches(self._pid, self._main.native_id or self._pid),
                busy_with(frames),
            )
        )

    def _cpu_s(self) -> float:
        """Seconds computed: beside an accelerator those of other processes alone, as this one may wait busily."""
        everybody_s = procfs.tree_cpu_s(self._pid)
        return everybody_s if self._computes_on_cpu else everybody_s - procfs.cpu_s(self._pid)

    def _write(self) -> None:
        """Writes the file anew; who reads it finds the old text or the new one."""
        progress = self._progress
        collectives = last_collectives(_COLLECTIVES) if progress.still_s > _COLLECTIVES_AFTER_S else []
        report = ProgressReport(
            progress.steps,
            progress.still_s,
            progress.limit_s,
            progress.usual_s,
            progress.busy_with,
            self._others_alive,
            tuple(collectives),
        )
        text = json.dumps({"rank": self._world.rank, "local_rank": self._world.local_rank, **asdict(report)})
        new = self._files.progress.with_suffix(".new")
        new.write_text(text)
        new.replace(self._files.progress)

    def _ask_others(self) -> None:
        """Of a run on several hosts: finds out whether a rank of another is alive."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_S or not rendezvous.store_answers():
            return
        self._checked_at = now
        with suppress(RuntimeError):  # the store has ended, and with it rank 0 or the launcher
            if self._others is None:
                self._others = OtherRanks(rendezvous.store().clone())  # type: ignore[attr-defined]  # not in torch's stubs
            is_still = 0 < self._progress.limit_s < 2 * self._progress.still_s
            self._others_alive = self._others.are_alive(is_still, now)

    # -- without our launcher ------------------------------------------------------------------------------------

    def _report_if_due(self) -> None:
        """Reports the stacks of the ranks of this host, where this one has got SIGUSR1, or all of them are stuck."""
        if self._host.was_asked([self._pid]):
            self._report(self._host.ranks())
        # Nothing is read of the other ranks as long as this one makes progress.
        if not self._progress.still_s:
            self._is_reported = False
            return
        pid_of_rank = self._host.ranks()
        pids = list(pid_of_rank.values())
        # A rank that has ended its run, or has not yet begun it, is not waited for by mistake.
        stuck_s = self._host.stuck_for(pids) if len(pids) == self._world.local_size else 0.0
        if stuck_s and not self._is_reported:
            self._is_reported = True
            self._report(pid_of_rank, stuck_s)

    def _report(self, pid_of_rank: Mapping[int, int], stuck_s: float = 0.0) -> None:
        """Reports the stacks, unless another rank does so or has just done it."""
        with self._host.alone() as is_first:
            if is_first:
                headline = self._host.headline(pid_of_rank.values(), stuck_s)
                reported = report_on(self._host, pid_of_rank, headline, Path())
                logger("world").warning("%s", reported.text)
