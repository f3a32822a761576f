"""`LaunchRecording`: what a launcher records about its run.

    begin -> [round -> failed] ... -> end

Every launcher writes one file to the registry of runs on this machine (`watch/registry.py`), with or without `--watch`. A
watched run also has a folder with a journal (`watch/journal.py`). All hosts give that folder the same name, from the time at
which the run began (in UTC) and the name of the script, so hosts with a shared working directory share the folder. The
leader's launcher, which has the journals of all hosts (`journals.py`), also starts the process that serves the live page and
the metrics (`page_process.py`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import ConfigError, LaunchError
from paceline.base.files import expanded
from paceline.base.process_name import process_name
from paceline.base.terminal import say
from paceline.launch import host
from paceline.launch.failure_report import describe, problem_of
from paceline.launch.job import NEW_FOLDER, Job, Target
from paceline.launch.launcher import Outcome
from paceline.launch.recordings import LauncherRecording
from paceline.launch.rounds import Round
from paceline_lens.watch import records
from paceline_lens.watch.journal import (
    JournalWriter,
    RunHeader,
    add_header,
    launcher_file,
    read_header,
    write_header,
)
from paceline_lens.watch.page_process import PageProcess
from paceline_lens.watch.registry import RegisteredRun, mark_ended, mark_watched, register

if TYPE_CHECKING:
    from paceline_lens.watch.status_line import StatusLine

_RUNS = "runs"


class LaunchRecording(LauncherRecording):
    """Records one run of this launcher. In a forked process its methods do nothing.

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
        self._members: dict[str, str] | None = None  # the host of each member of the last round, by member id
        self._failing = False
        self._status: StatusLine | None = None
        self.folder: Path | None = None
        if job.metrics_port is not None:
            check_metrics_port(job.metrics_port)
        if job.watch:
            folder = Path(_RUNS if job.watch == NEW_FOLDER else job.watch)
            try:
                host.try_to_write(folder)
            except OSError as error:
                raise _not_writable(str(folder), error) from None

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {} if self.folder is None else {"PACELINE_WATCH_DIR": str(self.folder)}

    def begin(self) -> None:
        """Registers the run on this machine."""
        job = self._job
        pid = os.getpid()
        run = RegisteredRun(
            _name(job.target), _command(), job.target.name, os.getcwd(), host.name(), pid, process_name(pid), time.time(),
            job.procs, job.nodes, job.node_rank,
        )  # fmt: skip
        # A home directory that cannot be written to does not stop the run: `paceline ps` does not list it then.
        with suppress(OSError):
            self._entry = register(run)

    def round(self, decided: Round, index: int, *, leads: bool) -> None:
        """Records a round whose processes are about to be started.

        Args:
            index: the number of this host in the round.
            leads: whether this launcher is the leader's. It writes the records that are the same for all hosts, and serves
                the page.
        """
        if self._job.watch and self._writer is None:
            self._open(decided, index, leads=leads)
        if not leads:
            self._end_page()  # from now on it would lack what other hosts write
        elif self.folder is not None and self._page is None:
            self._page = PageProcess(self.folder, self._job.metrics_port)
        members = {member.id: member.host for member in decided.members}
        before = members if self._members is None else self._members
        self._members = members
        if leads:
            procs = sum(member.procs for member in decided.members)
            number = decided.number - 1  # the journal counts rounds from 0
            joined = _hosts_besides(before, members)
            lost = _hosts_besides(members, before)
            self._write(
                records.RoundStarted(number, procs, len(members), decided.restarts, decided.reason, joined, lost)
            )

    def poll(self) -> None:
        """Prints the progress of a watched run to a terminal now and then, if its script prints nothing."""
        if self.folder is None:
            return
        if self._status is None:
            from paceline_lens.watch.status_line import StatusLine  # few runs are watched

            self._status = StatusLine(self.folder, sys.stderr)
        self._status.poll()

    def failed(self, outcome: Outcome) -> None:
        """Records that a round has failed."""
        # A failure on another node has no rank here: what has failed on this node is only a consequence of it.
        rank = None
        if outcome.failure is not None and not outcome.elsewhere:
            rank = outcome.failure.rank
        problem = problem_of(outcome, self._job)
        self._write(records.ErrorShown(rank, host.name(), problem.code, describe(outcome, self._job)))

    def stuck(self, text: str, file: str, ranks: list[int]) -> None:
        """Records that the stacks of the ranks were reported.

        Args:
            text: the stacks, with ranks at the same place in one group.
            file: the file with their stacks; "" where none could be written.
            ranks: the ranks for which the others wait; [] where that is not known.
        """
        self._write(records.Stuck(text, file, ranks))

    def refused(self, error: LaunchError) -> None:
        """Records an error of the launcher itself, and ends."""
        self._write(records.ErrorShown(None, host.name(), error.code, str(error)))
        self.end(1, error.problems[0].what)

    def end(self, exit_code: int, why: str = "") -> None:
        """Records the end of the launcher and ends its helper processes. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._write(records.LauncherEnded(exit_code, why))
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

    def _end_page(self) -> None:
        if self._page is not None:
            self._page.end()
            self._page = None

    def _open(self, decided: Round, index: int, *, leads: bool) -> None:
        """Makes the folder of the journal and the file of this launcher in it, and prints where it is."""
        job = self._job
        header = RunHeader(
            name=_name(job.target), command=_command(), script=job.target.name, host=host.name(), pid=os.getpid(),
            started=decided.founded_at, procs=sum(member.procs for member in decided.members), nodes=len(decided.members),
        )  # fmt: skip
        try:
            folder = expanded(job.watch).absolute()
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
            say(f"recorded in {shown}; `paceline watch {shown}` shows it")

    def _write(self, record: records.JournalRecord) -> None:
        """Adds a record to the journal. A full disk does not end the run: one line is printed."""
        if self._writer is None:
            return
        try:
            self._writer.append(record)
            self._failing = False
        except OSError as error:
            if not self._failing:
                say(f"could not write {self._writer.path}: {error.strerror}")
            self._failing = True


def check_metrics_port(port: int) -> None:
    """Checks that the port is free before anything is started.

    Raises:
        LaunchError: `metrics-port`.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                "metrics-port",
                f"metrics cannot be served at 127.0.0.1:{port}.",
                why=f"--metrics-port is {port}: {error.strerror}",
                fix="name another port; `--metrics-port 0` takes a free one and prints it",
            ) from None


def _new_folder(header: RunHeader) -> Path:
    """Makes a new folder for this run; another run of the same script may have begun in the same second.

    The folder appears with the header already in it, by which other hosts of this run recognise it.
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
        with suppress(ConfigError):  # the folder does not hold a run
            if read_header(folder / "watch").started == header.started:
                return folder / "watch"  # another host of this run has made it
        number += 1


def _hosts_besides(others: dict[str, str], members: dict[str, str]) -> list[str]:
    """Names of the members' hosts whose ids are not among the others; both are id -> name."""
    return [name for member_id, name in members.items() if member_id not in others]


def _writer_in(folder: Path, index: int) -> JournalWriter:
    """The file of this launcher: with the number of its host, or the next free number, since these change between rounds."""
    number = index
    while True:
        path = folder / launcher_file(number)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return JournalWriter(path)


def _not_writable(folder: str, error: OSError) -> LaunchError:
    return LaunchError(
        "watch-write",
        "the run was to be recorded, but its folder cannot be written to.",
        why=f"{folder}: {error.strerror}",
        fix="name another folder: `--watch-dir FOLDER`, or leave --watch out",
    )


def _name(target: Target) -> str:
    """Returns the name of a run: its script without the suffix, or the last part of the name of a module."""
    _, _, name = target.name.rpartition(".")
    if target.kind == "script":
        name = Path(target.name).stem
    name = re.sub(r"[^\w.-]", "-", Path(name).name)
    return name[:60] or "run"


def _command() -> list[str]:
    """Returns the words that started this launcher."""
    return [Path(sys.argv[0]).name or "python", *sys.argv[1:]]


def _shown(folder: Path) -> str:
    """A folder relative to the working directory where it lies inside, else absolute."""
    inside = os.path.relpath(folder)
    return str(folder) if inside.startswith("..") else inside
