"""`Recording`: what a launcher writes down of its run: its file among the runs of this machine, and its part of the journal.

    begin -> [round -> error] ... -> end

Every launcher has a file among the runs of this machine (`watch/registry.py`), with `--watch` or without. Only a watched run
has a folder with a journal (`watch/journal.py`). All hosts give that folder the same name, made of the moment at which the
run was founded (in UTC) and the script, so that hosts which share the working directory share it. The launcher that leads
also starts a process that serves the live page (`watch/page_process.py`): it has the journals of all hosts (`journals.py`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import ConfigError, LaunchError
from paceline.base.process_name import process_name
from paceline.launch import host
from paceline.launch.launcher import Job, Outcome, Target
from paceline.launch.metrics_process import MetricsProcess, check_port
from paceline.launch.report import describe, problem_of
from paceline.launch.rounds import Round
from paceline.watch import records
from paceline.watch.journal import (
    JournalWriter,
    RunHeader,
    add_header,
    launcher_file,
    read_header,
    write_header,
)
from paceline.watch.page_process import PageProcess
from paceline.watch.registry import RegisteredRun, mark_ended, mark_watched, register

if TYPE_CHECKING:
    from paceline.watch.status_line import StatusLine

NEW_FOLDER = "new"  # `Job.watch` of a run whose folder is made for it
_RUNS = "runs"


class Recording:
    """Records one run of this launcher. In a process that was forked from it every method does nothing.

    Args:
        job: what is run.

    Attributes:
        folder: of the journal; None before the first round, and of a run that is not watched.

    Raises:
        LaunchError: `watch-write`, where the folder cannot be written to; `metrics-port`, where the port is taken.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pid = os.getpid()
        self._writer: JournalWriter | None = None
        self._entry: Path | None = None
        self._page: PageProcess | None = None
        self._members: dict[str, str] | None = None  # id -> host, of the round before
        self._failing = False
        self._status: StatusLine | None = None
        self.folder: Path | None = None
        self._metrics: MetricsProcess | None = None
        if job.metrics_port is not None:
            check_port(job.metrics_port)
        if job.watch:
            _check_writable(Path(_RUNS if job.watch == NEW_FOLDER else job.watch))

    @property
    def env(self) -> dict[str, str]:
        """What the ranks must know."""
        return {} if self.folder is None else {"PACELINE_WATCH_DIR": str(self.folder)}

    def begin(self) -> None:
        """The launcher begins."""
        job, pid = self._job, os.getpid()
        run = RegisteredRun(
            _name(job.target), _command(), job.target.name, os.getcwd(), host.name(), pid, process_name(pid), time.time(),
            job.procs, job.nodes, job.node_rank,
        )  # fmt: skip
        # A home that cannot be written to is no reason not to train: `paceline ps` then does not know of the run.
        with suppress(OSError):
            self._entry = register(run)

    def round(self, decided: Round, index: int, *, leads: bool) -> None:
        """The processes of a round are about to be started.

        Args:
            index: number of this host in it.
            leads: whether this launcher leads; then it writes what is the same for all, and serves the page.
        """
        if self._job.watch and self._writer is None:
            self._open(decided, index, leads=leads)
        if self.folder is not None and leads:
            self._serve_page(self.folder)
        elif self.folder is not None:
            self._end_page()  # from now on it would lack what other hosts write
        members = {member.id: member.host for member in decided.members}
        before = members if self._members is None else self._members
        self._members = members
        if leads:
            joined = [name for member_id, name in members.items() if member_id not in before]
            lost = [name for member_id, name in before.items() if member_id not in members]
            procs = sum(member.procs for member in decided.members)
            self._write(
                records.Round(
                    decided.number - 1, procs, len(members), decided.restarts, decided.reason, joined, lost
                )
            )  # fmt: skip

    def poll(self) -> None:
        """Says on a terminal now and then how far a watched run is, where its script says nothing."""
        if self.folder is None:
            return
        if self._status is None:
            from paceline.watch.status_line import (
                StatusLine,
            )  # what it needs to read a journal is for watched runs alone

            self._status = StatusLine(self.folder, sys.stderr)
        self._status.poll()

    def failed(self, outcome: Outcome) -> None:
        """A round has failed."""
        failure = None if outcome.elsewhere else outcome.failure
        rank = None if failure is None else failure.rank
        problem = problem_of(outcome, self._job)
        self._write(records.ErrorShown(rank, host.name(), problem.code, describe(outcome, self._job)))

    def stuck(self, text: str, file: str, ranks: list[int]) -> None:
        """The ranks' stacks were reported.

        Args:
            text: where all ranks are, in groups.
            file: the file with their stacks; "" where none could be written.
            ranks: those that hold the others up; [] where that is not known.
        """
        self._write(records.Stuck(text, file, ranks))

    def refused(self, error: LaunchError) -> None:
        """The launcher itself cannot go on."""
        self._write(records.ErrorShown(None, host.name(), error.code, str(error)))
        self.end(1, error.problems[0].what)

    def end(self, exit_code: int, why: str = "") -> None:
        """The launcher ends; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._write(records.End(exit_code, why))
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._entry is not None:
            with suppress(OSError):
                mark_ended(self._entry, time.time(), exit_code)
            self._entry = None

    def close(self) -> None:
        """Ends the page, which is written to `report.html` then: the last lines of all hosts are there."""
        if os.getpid() == self._pid:
            self._end_page()

    def _serve_page(self, folder: Path) -> None:
        if self._page is None:
            self._page = PageProcess(folder)
            if self._job.metrics_port is not None:
                self._metrics = MetricsProcess(folder, self._job.metrics_port)

    def _end_page(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._page is not None:
            self._page.end()
            self._page = None

    def _open(self, decided: Round, index: int, *, leads: bool) -> None:
        """Makes the folder and this launcher's file in it, and says where they are."""
        job = self._job
        header = RunHeader(
            name=_name(job.target), command=_command(), script=job.target.name, host=host.name(), pid=os.getpid(),
            started=decided.founded_at, procs=sum(member.procs for member in decided.members), nodes=len(decided.members),
        )  # fmt: skip
        try:
            folder = Path(job.watch).expanduser().absolute()
            if job.watch == NEW_FOLDER:
                folder = _new_folder(header)
            if leads:
                write_header(folder, header)
            else:
                add_header(folder, header)
            self._writer = _writer_in(folder, index)
        except OSError as error:
            raise _not_writable(error.filename or job.watch, error) from None
        self.folder = folder
        if self._entry is not None:
            with suppress(OSError):
                mark_watched(self._entry, str(folder))
        if leads:
            shown = _shown(folder.parent if folder.name == "watch" else folder)
            print(f"paceline: recorded in {shown}; `paceline watch {shown}` shows it", file=sys.stderr, flush=True)

    def _write(self, record: records.Record) -> None:
        """Adds a line. A disk that is full must not end the run: it is said once."""
        if self._writer is None:
            return
        try:
            self._writer.append(record)
            self._failing = False
        except OSError as error:
            if not self._failing:
                print(f"paceline: could not write {self._writer.path}: {error.strerror}", file=sys.stderr, flush=True)
            self._failing = True


def _new_folder(header: RunHeader) -> Path:
    """A folder for this run alone: another one of the same script may have begun in the same second.

    It appears with its header in it, by which another host of this run knows it.
    """
    runs = Path(_RUNS).absolute()
    moment = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime(header.started))
    name = f"{moment}-{header.name}"
    staged = runs / f".{name}.{os.urandom(4).hex()}"
    number = 1
    while True:
        folder = runs / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            write_header(staged / "watch", header)
            try:
                staged.rename(folder)
                return folder / "watch"
            except OSError as error:
                shutil.rmtree(staged)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        with suppress(ConfigError):  # what lies there is no run of ours
            if read_header(folder / "watch").started == header.started:
                return folder / "watch"  # another host of this run was here first
        number += 1


def _writer_in(folder: Path, index: int) -> JournalWriter:
    """This launcher's file: the number of its host, or the next that no launcher has, as numbers change from round to round."""
    number = index
    while True:
        path = folder / launcher_file(number)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return JournalWriter(path)


def _check_writable(folder: Path) -> None:
    """Makes the folder, before anything is started.

    Raises:
        LaunchError: `watch-write`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _not_writable(str(folder), error) from None


def _not_writable(folder: str, error: OSError) -> LaunchError:
    return LaunchError(
        "watch-write",
        "the run was to be recorded, but its folder cannot be written to.",
        why=f"{folder}: {error.strerror}",
        fix="name another folder: `--watch-dir FOLDER`, or leave --watch out",
    )


def _name(target: Target) -> str:
    """What to call a run: its script without the ending, or the last part of a module's name."""
    _, _, name = target.name.rpartition(".")
    if target.kind == "script":
        name = Path(target.name).stem
    name = re.sub(r"[^\w.-]", "-", Path(name).name)
    return name[:60] or "run"


def _command() -> list[str]:
    """The words that started this launcher."""
    return [Path(sys.argv[0]).name or "python", *sys.argv[1:]]


def _shown(folder: Path) -> str:
    """A folder as one would type it here."""
    inside = os.path.relpath(folder)
    return str(folder) if inside.startswith("..") else inside
