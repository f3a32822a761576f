"""Watches the ranks of a host: whether they are stuck, and whether somebody has requested their stacks. Also makes the report.

The launcher of the ranks uses it; without one, a rank does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.base.json_fields import read
from paceline.base.process_name import process_state
from paceline.world.stacks.dump import DumpFiles
from paceline.world.stacks.parse import RankPlace
from paceline_lens.hangs import procfs
from paceline_lens.hangs.collect import Pause, collect
from paceline_lens.hangs.progress import LOOK_S, SILENT_LOOKS, ProgressReport, RankLife, stuck_for
from paceline_lens.hangs.stack_report import full_report, grouped, place_of, short_report

ASKED = "as SIGUSR1 asked for"  # headline of a report that somebody has requested
_IDLE = 0.1  # a process that computes for less than this part of the time is idle


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
        self._is_reported = False  # this standstill

    def due(self, pids: Sequence[int], is_asked: bool = False, are_all: bool = True) -> str:
        """Returns the headline of the report that is due; "" if none is. A standstill is reported once.

        Args:
            pids: the running ranks of this host.
            is_asked: whether somebody has requested a report in another way than by a signal to one of them.
            are_all: whether no rank is missing. If one has ended or has not begun yet, the others may wait for it.
        """
        if self.was_asked(pids) or is_asked:
            return ASKED
        stuck_s = self.stuck_for(pids) if are_all else 0.0
        is_reported = self._is_reported
        self._is_reported = stuck_s > 0
        if not stuck_s or is_reported:
            return ""
        reports = [self.progress_of(pid) for pid in pids]
        usual_s = max((report.usual_s for report in reports if report is not None), default=0.0)
        return f"no rank has made progress for {stuck_s:.0f} s (a step usually takes {usual_s:.3g} s)"

    def stuck_for(self, pids: Iterable[int]) -> float:
        """Returns for how many seconds all of these ranks have been stuck; 0 if they are not."""
        return stuck_for([self._life(pid) for pid in pids])

    def progress_of(self, pid: int) -> ProgressReport | None:
        """Returns the report of a rank about its progress; None if there is none, or no longer."""
        try:
            text = DumpFiles(self.folder, pid).progress.read_text()
        except FileNotFoundError:
            return None
        report: ProgressReport = read(ProgressReport, json.loads(text))
        return report

    def places(self, pid_of_rank: Mapping[int, int], pause: Pause = time.sleep) -> list[RankPlace]:
        """Collects the stacks of ranks of this host, and returns where they are.

        Args:
            pid_of_rank: the ranks.
            pause: that of `collect`.
        """
        # This is read first, because py-spy may take seconds.
        reports = {rank: self.progress_of(pid) for rank, pid in pid_of_rank.items()}
        places = []
        for rank, process in collect(pid_of_rank, self.folder, pause).items():
            report = reports[rank]
            still_s = report.still_s if report is not None else 0.0
            collectives = report.collectives if report is not None else ()
            places.append(place_of(rank, process, still_s, collectives))
        return places

    def ranks(self) -> dict[int, int]:
        """Returns the process number of each running rank that writes into this folder, by rank."""
        pid_of_rank: dict[int, int] = {}
        for path in self.folder.glob("*.progress"):
            pid = int(path.stem)
            report = self.progress_of(pid)
            if report is not None and process_state(pid) not in ("", "Z"):
                pid_of_rank[report.rank] = pid
        return pid_of_rank

    def first_at_work(self, pid_of_rank: Mapping[int, int]) -> int | None:
        """Returns the first of these ranks that no signal has stopped and whose watcher runs; None if there is none."""
        at_work = []
        for rank, pid in pid_of_rank.items():
            silent_s = time.time() - self._time_of(pid) / 1e9
            if process_state(pid) != "T" and silent_s < SILENT_LOOKS * LOOK_S:
                at_work.append(rank)
        return min(at_work, default=None)

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

    def _life(self, pid: int) -> RankLife:
        now = time.monotonic()
        report = self.progress_of(pid)
        written_ns = self._time_of(pid)
        # A rank that leaves deletes its file, which may happen after it was read.
        if report is None or not written_ns:
            self._written.pop(pid, None)
            return RankLife(None)
        if self._written.get(pid, (0, 0.0))[0] != written_ns:
            self._written[pid] = (written_ns, now)
        cpu_s = procfs.tree_cpu_s(pid)
        before_s, busy_at = self._computed.get(pid, (cpu_s, now))
        if cpu_s - before_s > _IDLE * LOOK_S:
            before_s, busy_at = cpu_s, now
        self._computed[pid] = (cpu_s, busy_at)
        return RankLife(report, now - self._written[pid][1], process_state(pid) == "T", now - busy_at)

    def _time_of(self, pid: int) -> int:
        try:
            return DumpFiles(self.folder, pid).progress.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def report(
    places: Sequence[RankPlace], headline: str, folder: Path, notes: Sequence[str] = ()
) -> tuple[str, Path | None]:
    """Returns the report for the terminal, and the file with all stacks; None if it could not be written.

    Args:
        places: where all ranks are.
        headline: what the report is about.
        folder: the folder for the file.
        notes: lines about what is missing.
    """
    if headline == ASKED:
        ranks = "1 rank" if len(places) == 1 else f"{len(places)} ranks"
        headline = f"stacks of {ranks}, {ASKED}"
    groups = grouped(places)
    try:
        file = _write(folder, full_report(f"paceline: {headline}", groups, notes))
        where = f"all stacks: {file.absolute()}"
    except OSError as error:
        file = None
        where = f"the stacks could not be written to {folder.absolute()}: {error.strerror}"
    return short_report(f"paceline: {headline}:", groups, [*notes, where]), file


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
