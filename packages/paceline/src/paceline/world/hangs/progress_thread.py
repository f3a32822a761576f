"""`ProgressThread` writes once a second whether this rank makes progress, into a file beside those of its stacks.

    under `paceline launch`   the launcher reads the file, and decides whether the run is stuck
    under torchrun            a rank that gets SIGUSR1, or that finds all ranks of its host stuck, collects their stacks

The training loop only calls `stepped` once a step. With several hosts, a rank that has made no progress for half of its limit
asks over the store whether another rank is alive. Before that, nothing is sent.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.log import logger
from paceline.torch_internals.flight_recorder import last_collectives
from paceline.world import lifetime, rendezvous
from paceline.world.hangs.progress import Look, Progress, ProgressReport
from paceline.world.places import frame_of_thread, line_of
from paceline.world.stacks import dump, procfs
from paceline.world.stacks.parse import Frame
from paceline.world.stacks.watch import LOOK_S, HostWatch, report_of_stacks, stacks_of
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_COLLECTIVES = 5
_COLLECTIVES_AFTER_S = 3.0  # a rank that has been still for so long also writes its last collectives
_ASKED, _ALIVE = "progress/asked", "progress/alive"
_ANSWERS_S = 10.0  # a rank that is alive answers within this time
_CHECK_S = 5.0  # seconds between two requests to the store

# Long operations without a step, by a part of the path of a file on the stack of the main thread.
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
    """Starts the thread of this process, which runs until the process leaves its group; None if nobody would read its file.

    Args:
        world: this process, after it has joined its group.
        stuck_after: the setting `stuck_after`.
        computes_on_cpu: whether a busy process computes. With an accelerator, a busy process may only be waiting.
    """
    folder = dump.folder_of_launcher() or dump.folder_under_torchrun()
    if folder is None or stuck_after == "0":
        return None
    thread = lifetime.kept(ProgressThread)
    if thread is None or not thread.alive:
        thread = ProgressThread(folder, world, stuck_after, computes_on_cpu)
        lifetime.keep(thread)
    return thread


def busy_with(frames: list[Frame]) -> str:
    """Returns the long operation that a thread is in, by its stack; "" for none."""
    for frame in frames:
        for part, name in _BUSY_FILES.items():
            if part in frame.file:
                return name
        if frame.function in _ONE_FIRST:
            return "waiting for the one process that works first"
    return ""


class OtherRanks:
    """Asks over the store whether any rank of any host is alive. Once a rank asks, each rank that is alive increments a number.

    Args:
        store: the store, over a connection that only this thread uses: the main thread may be waiting on another one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = -1
        self._counted_at = 0.0

    def are_alive(self, is_still: bool, now: float) -> bool:
        """Returns whether another rank may be alive. It must be called every `_CHECK_S` seconds.

        Args:
            is_still: whether this rank has been still for so long that it asks.
            now: seconds of a monotonic clock.

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
    """Runs the thread of one process.

    Args:
        folder: the folder that the ranks of this host share.
        world, stuck_after, computes_on_cpu: those of `watch`.
    """

    def __init__(self, folder: Path, world: World, stuck_after: str, computes_on_cpu: bool) -> None:
        self._world = world
        self._computes_on_cpu = computes_on_cpu
        self._pid = os.getpid()
        self._files = dump.DumpFiles(folder, self._pid)
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
        """Records that an optimizer of this process has stepped."""
        self._progress.stepped(time.monotonic())

    def close(self, why: str) -> None:
        """Ends the thread. After this the process does not count as stuck, however long it runs."""
        self._stop.set()
        self._thread.join(LOOK_S)
        self._files.progress.unlink(missing_ok=True)
        if not self._has_launcher:
            dump.leave(self._files)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look()
            try:
                # This comes before any request to the store, which does not return if rank 0 is stopped.
                self._write()
            except OSError:
                return  # the launcher has ended, and its folder with it
            if self._world.nodes > 1:
                self._ask_others()
            if not self._has_launcher:
                self._report_if_due()

    def _look(self) -> None:
        assert self._main.ident is not None, "the main thread has begun"
        frames: list[Frame] = []
        places: list[tuple[int, int]] = []
        with frame_of_thread(self._main.ident) as frame:
            while frame is not None:
                frames.append(Frame(frame.f_code.co_filename, line_of(frame), frame.f_code.co_name))
                places.append((id(frame), frame.f_lasti))
                frame = frame.f_back
        # Only the frames from the script's line outwards are compared. A library that the script has called may poll: a loader
        # checks every 5 s whether its workers are alive.
        first_of_script = next((index for index, frame in enumerate(frames) if frame.is_script), 0)
        self._progress.look(
            Look(
                time.monotonic(),
                tuple(places[first_of_script:]),
                self._cpu_s(),
                procfs.switches(self._pid, self._main.native_id or self._pid),
                busy_with(frames),
            )
        )

    def _cpu_s(self) -> float:
        """Returns the seconds of computation. With an accelerator, only child processes count: this one may wait busily."""
        total_s = procfs.tree_cpu_s(self._pid)
        return total_s if self._computes_on_cpu else total_s - procfs.cpu_s(self._pid)

    def _write(self) -> None:
        """Replaces the file at once, so a reader gets the old or the new text."""
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
        """With several hosts, finds out whether a rank of another host is alive."""
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
        """Reports the stacks of the ranks of this host if this rank has got SIGUSR1, or if all of them are stuck."""
        if self._host.was_asked([self._pid]):
            self._report(self._host.ranks())
        # As long as this rank makes progress, it does not read the files of the others.
        if not self._progress.still_s:
            self._is_reported = False
            return
        pid_of_rank = self._host.ranks()
        pids = list(pid_of_rank.values())
        # If a rank has ended or has not begun yet, the others may wait for it without being stuck.
        all_present = len(pids) == self._world.local_size
        stuck_s = self._host.stuck_for(pids) if all_present else 0.0
        if stuck_s and not self._is_reported:
            self._is_reported = True
            self._report(pid_of_rank, stuck_s)

    def _report(self, pid_of_rank: Mapping[int, int], stuck_s: float = 0.0) -> None:
        """Reports the stacks, unless another rank reports them now or has just done so."""
        with self._host.alone() as is_first:
            if is_first:
                headline = self._host.headline(pid_of_rank.values(), stuck_s)
                report = report_of_stacks(stacks_of(self._host, pid_of_rank), headline, Path())
                logger("world").warning("%s", report.text)
