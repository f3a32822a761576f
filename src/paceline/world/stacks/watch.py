"""What is watched of the ranks of a host, by their launcher or, without it, by one of them: whether they are stuck, and
whether somebody has asked for their stacks. And the report of both."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.world.hangs.progress import ProgressReport, RankLife, stuck_for
from paceline.world.stacks import procfs
from paceline.world.stacks.collect import Pause, collect
from paceline.world.stacks.dump import REPORTING, Files
from paceline.world.stacks.groups import ProcessStacks, full_report, grouped, in_one_sentence, short_report

LOOK_S = 1.0  # seconds between two looks
ASKED = "as SIGUSR1 asked for"  # headline of a report that somebody wants
_IDLE = 0.1  # a process that computes for less than this part of the time is idle
_SAME_S = 5.0  # ranks that get the signal together ask once


@dataclass(frozen=True)
class Reported:
    """A report that was made.

    Attributes:
        text: for the terminal.
        sentence: where the ranks are, in one sentence.
        file: where the stacks are; None where no file could be written.
        blamed_ranks: those at which it hangs, as far as can be told: stopped, or not where most are; () where all are at
            the same place.
        blamed_rank: the first of them; of ranks that are all at the same place, the first.
    """

    text: str
    sentence: str
    file: Path | None
    blamed_ranks: tuple[int, ...]
    blamed_rank: int


class HostWatch:
    """The ranks of a host, as whoever watches them sees them.

    Args:
        folder: that of their files.
        clock: seconds of a clock that only goes forward.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._written: dict[int, tuple[int, float]] = {}  # by pid: the file's time, and when it was seen to be new
        self._computed: dict[int, tuple[float, float]] = {}  # by pid: seconds computed, and until when it did
        self._asked: dict[int, int] = {}  # by pid: the size of the file that grows as somebody asks

    def stuck_for(self, pids: Iterable[int]) -> float:
        """For how many seconds all of these ranks have been stuck; 0 where they are not."""
        return stuck_for([self._life(pid) for pid in pids], LOOK_S)

    def progress_of(self, pid: int) -> dict[str, Any]:
        """What a rank has written of its progress; {} where it has not, or no longer does."""
        try:
            values: dict[str, Any] = json.loads(Files(self.folder, pid).progress.read_text())
        except (OSError, ValueError):  # it has left, or begins to write
            return {}
        return values

    def headline(self, pids: Iterable[int], stuck_s: float = 0.0) -> str:
        """What a report of these ranks is about: that they are stuck, or that somebody has asked for their stacks."""
        if not stuck_s:
            return ASKED
        usual_s = max(self.progress_of(pid).get("usual_s", 0.0) for pid in pids)
        return f"no rank has made progress for {stuck_s:.0f} s (a step usually takes {usual_s:.3g} s)"

    def ranks(self) -> dict[int, int]:
        """The ranks that write into this folder, with their pids."""
        pids = [int(path.stem) for path in self.folder.glob("*.progress")]
        alive = [pid for pid in pids if procfs.state(pid) not in ("", "Z")]
        return {self.progress_of(pid)["rank"]: pid for pid in alive if self.progress_of(pid)}

    def was_asked(self, pids: Iterable[int]) -> bool:
        """Whether one of these has got SIGUSR1 since the last call."""
        was_asked = False
        for pid in pids:
            try:
                size = Files(self.folder, pid).asked.stat().st_size
            except FileNotFoundError:
                size = 0
            was_asked |= size > self._asked.get(pid, 0)
            self._asked[pid] = size
        return was_asked

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """While it is open, no other process of this host makes a report; whether none has just made one."""
        with (self.folder / REPORTING).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            has_just_reported = file.tell() > 0 and time.time() - os.fstat(file.fileno()).st_mtime < _SAME_S
            yield not has_just_reported
            file.write(".")

    def _life(self, pid: int) -> RankLife:
        now = self._clock()
        values = self.progress_of(pid)
        if not values:
            self._written.pop(pid, None)
            return RankLife(None)
        written_ns = self._time_of(pid)
        if self._written.get(pid, (0, 0.0))[0] != written_ns:
            self._written[pid] = (written_ns, now)
        cpu_s = procfs.tree_cpu_s(pid)
        before_s, busy_at = self._computed.get(pid, (cpu_s, now))
        if cpu_s - before_s > _IDLE * LOOK_S:
            before_s, busy_at = cpu_s, now
        self._computed[pid] = (cpu_s, busy_at)
        return RankLife(report_of(values), now - self._written[pid][1], procfs.state(pid) == "T", now - busy_at)

    def _time_of(self, pid: int) -> int:
        try:
            return Files(self.folder, pid).progress.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def report_of(values: Mapping[str, Any]) -> ProgressReport:
    """What a rank has written, as an object."""
    fields = {name: value for name, value in values.items() if name not in ("rank", "local_rank")}
    return ProgressReport(**{**fields, "collectives": tuple(values["collectives"])})


def report_on(
    host: HostWatch, pid_of_rank: Mapping[int, int], headline: str, folder: Path, pause: Pause = time.sleep
) -> Reported:
    """Collects the stacks of ranks of this host, and writes them to a file. Arguments as of `stacks_of` and `reported`."""
    return reported(stacks_of(host, pid_of_rank, pause), headline, folder)


def stacks_of(host: HostWatch, pid_of_rank: Mapping[int, int], pause: Pause = time.sleep) -> list[ProcessStacks]:
    """The stacks of ranks of this host, with what they have said of their progress.

    Args:
        host: the ranks.
        pid_of_rank: which of them.
        pause: as of `collect`.
    """
    # Before py-spy, which may take seconds.
    progress = {pid: host.progress_of(pid) for pid in pid_of_rank.values()}
    processes = collect(pid_of_rank, host.folder, pause)
    return [_with_progress(process, progress[process.pid]) for process in processes]


def reported(
    stacks: Sequence[ProcessStacks], headline: str, folder: Path | None, notes: Sequence[str] = ()
) -> Reported:
    """Makes the report of stacks.

    Args:
        stacks: of all ranks.
        headline: what the report is about.
        folder: where its file is written; None for no file.
        notes: lines about what is missing.
    """
    if headline == ASKED:
        headline = f"stacks of {len(stacks)} rank{'s' * (len(stacks) > 1)}, {ASKED}"
    groups = grouped(stacks)
    footer = list(notes)
    file = None
    if folder is not None:
        try:
            file = _write(folder, full_report(f"paceline: {headline}", groups, notes))
            footer.append(f"all stacks: {file}")
        except OSError as error:
            footer.append(f"the stacks could not be written to {folder.absolute()}: {error.strerror}")
    blamed = min(groups, key=lambda group: (not group.members[0].is_stopped, len(group.members)))
    return Reported(
        short_report(f"paceline: {headline}:", groups, footer),
        in_one_sentence(groups),
        file,
        tuple(blamed.ranks) if len(groups) > 1 else (),
        blamed.ranks[0],
    )


def _with_progress(process: ProcessStacks, values: Mapping[str, Any]) -> ProcessStacks:
    if not values:
        return process
    report = report_of(values)
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
