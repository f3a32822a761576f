"""Watches the ranks of a host: whether they are stuck, and whether somebody has requested their stacks. Also makes the report.

The launcher of the ranks uses it; without one, a rank does.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.world.hangs.progress import ProgressReport, RankLife, stuck_for
from paceline.world.stacks import procfs
from paceline.world.stacks.collect import Pause, collect
from paceline.world.stacks.dump import REPORTING, DumpFiles
from paceline.world.stacks.groups import ProcessStacks, full_report, grouped, in_one_sentence, short_report

LOOK_S = 1.0  # seconds between two looks
ASKED = "as SIGUSR1 asked for"  # headline of a report that somebody has requested
_IDLE = 0.1  # a process that computes for less than this part of the time is idle
_SAME_S = 5.0  # if all ranks get the signal within this time, one report is made


@dataclass(frozen=True)
class StackReport:
    """Shows where the ranks of a run are.

    Attributes:
        text: the text for the terminal.
        sentence: where the ranks are, in one sentence.
        file: the file with all stacks; None if it could not be written.
        blamed_ranks: the ranks that probably cause the hang: those that are stopped, or else the smallest group; () if all
            ranks are at the same place.
        blamed_rank: the first of them; the first of all ranks if all are at the same place.
    """

    text: str
    sentence: str
    file: Path | None
    blamed_ranks: tuple[int, ...]
    blamed_rank: int


class HostWatch:
    """Watches the ranks of a host through the files that they write.

    Args:
        folder: the folder of their files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # All by pid: the time of the progress file, and when it was first seen; the seconds of computation, and when they
        # last grew; the size of the file that grows with each SIGUSR1.
        self._written: dict[int, tuple[int, float]] = {}
        self._computed: dict[int, tuple[float, float]] = {}
        self._asked: dict[int, int] = {}

    def stuck_for(self, pids: Iterable[int]) -> float:
        """Returns for how many seconds all of these ranks have been stuck; 0 if they are not."""
        return stuck_for([self._life(pid) for pid in pids], LOOK_S)

    def progress_of(self, pid: int) -> dict[str, Any]:
        """Returns the report of a rank about its progress; {} if there is none, or no longer."""
        try:
            values: dict[str, Any] = json.loads(DumpFiles(self.folder, pid).progress.read_text())
        except (OSError, ValueError):
            return {}  # the rank has left, or has just begun to write
        return values

    def headline(self, pids: Iterable[int], stuck_s: float = 0.0) -> str:
        """Returns the headline of a report: that these ranks are stuck, or that somebody has requested their stacks."""
        if not stuck_s:
            return ASKED
        usual_s = max(self.progress_of(pid).get("usual_s", 0.0) for pid in pids)
        return f"no rank has made progress for {stuck_s:.0f} s (a step usually takes {usual_s:.3g} s)"

    def ranks(self) -> dict[int, int]:
        """Returns the process number of each running rank that writes into this folder, by rank."""
        pid_of_rank: dict[int, int] = {}
        for path in self.folder.glob("*.progress"):
            pid = int(path.stem)
            progress = self.progress_of(pid)
            if progress and procfs.state(pid) not in ("", "Z"):
                pid_of_rank[progress["rank"]] = pid
        return pid_of_rank

    def was_asked(self, pids: Iterable[int]) -> bool:
        """Returns whether one of these processes has got SIGUSR1 since the last call."""
        was_asked = False
        for pid in pids:
            try:
                size = DumpFiles(self.folder, pid).asked.stat().st_size
            except FileNotFoundError:
                size = 0
            was_asked |= size > self._asked.get(pid, 0)
            self._asked[pid] = size
        return was_asked

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keeps other processes of this host from making a report meanwhile. Yields whether this process should make one."""
        with (self.folder / REPORTING).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
            has_just_reported = file.tell() > 0 and age_s < _SAME_S
            yield not has_just_reported
            file.write(".")

    def _life(self, pid: int) -> RankLife:
        now = time.monotonic()
        values = self.progress_of(pid)
        written_ns = self._time_of(pid)
        # A rank that leaves deletes its file, which may happen after it was read.
        if not values or not written_ns:
            self._written.pop(pid, None)
            return RankLife(None)
        if self._written.get(pid, (0, 0.0))[0] != written_ns:
            self._written[pid] = (written_ns, now)
        cpu_s = procfs.tree_cpu_s(pid)
        before_s, busy_at = self._computed.get(pid, (cpu_s, now))
        if cpu_s - before_s > _IDLE * LOOK_S:
            before_s, busy_at = cpu_s, now
        self._computed[pid] = (cpu_s, busy_at)
        return RankLife(
            progress_report_of(values), now - self._written[pid][1], procfs.state(pid) == "T", now - busy_at
        )

    def _time_of(self, pid: int) -> int:
        try:
            return DumpFiles(self.folder, pid).progress.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def progress_report_of(values: Mapping[str, Any]) -> ProgressReport:
    """Makes the report of a rank from what it has written."""
    fields = {name: value for name, value in values.items() if name not in ("rank", "local_rank")}
    return ProgressReport(**{**fields, "collectives": tuple(values["collectives"])})


def stacks_of(host: HostWatch, pid_of_rank: Mapping[int, int], pause: Pause = time.sleep) -> list[ProcessStacks]:
    """Returns the stacks of ranks of this host, with their reports about their progress.

    Args:
        host: the watch of the host.
        pid_of_rank: the ranks.
        pause: that of `collect`.
    """
    # This is read first, because py-spy may take seconds.
    progress = {pid: host.progress_of(pid) for pid in pid_of_rank.values()}
    processes = collect(pid_of_rank, host.folder, pause)
    return [_with_progress(process, progress[process.pid]) for process in processes]


def report_of_stacks(
    stacks: Sequence[ProcessStacks], headline: str, folder: Path | None, notes: Sequence[str] = ()
) -> StackReport:
    """Makes a report from stacks.

    Args:
        stacks: the stacks of all ranks.
        headline: what the report is about.
        folder: the folder for its file; None for no file.
        notes: lines about what is missing.
    """
    if headline == ASKED:
        ranks = "1 rank" if len(stacks) == 1 else f"{len(stacks)} ranks"
        headline = f"stacks of {ranks}, {ASKED}"
    groups = grouped(stacks)
    footer = list(notes)
    file = None
    if folder is not None:
        try:
            file = _write(folder, full_report(f"paceline: {headline}", groups, notes))
            footer.append(f"all stacks: {file.absolute()}")
        except OSError as error:
            footer.append(f"the stacks could not be written to {folder.absolute()}: {error.strerror}")
    # A group that is stopped by a signal, else the smallest one.
    blamed = min(groups, key=lambda group: (not group.members[0].is_stopped, len(group.members)))
    return StackReport(
        short_report(f"paceline: {headline}:", groups, footer),
        in_one_sentence(groups),
        file,
        tuple(blamed.ranks) if len(groups) > 1 else (),
        blamed.ranks[0],
    )


def _with_progress(process: ProcessStacks, values: Mapping[str, Any]) -> ProcessStacks:
    if not values:
        return process
    report = progress_report_of(values)
    return replace(process, still_s=report.still_s, collectives=report.collectives)


def _write(folder: Path, text: str) -> Path:
    """Writes `stacks-N.txt` with the first number that is free; other hosts may write into the same folder.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"stacks-{number}.txt"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1
