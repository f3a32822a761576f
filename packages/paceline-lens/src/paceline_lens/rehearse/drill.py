"""`Drill`: the job runs with its usual launcher, one fault strikes at one step, and everything that follows is recorded.

    start the launchers -> until the goal is reached: read the lines of the processes, look which of them still live,
                           cut and mend the link, start a launcher again that was killed or has saved and ended
    stop                   two SIGTERMs: what the drill has reached is written down already

Faults that one process can bring about strike in that process, at an exact step (`job_in_drill.py`).
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.exits import PREEMPTED
from paceline.base.process_name import process_state
from paceline.launch import host
from paceline_lens.processes import process_exists
from paceline_lens.rehearse.cable import HostsWithCable
from paceline_lens.rehearse.lines import DrillLine, DrillOrders, LineReader

FOLDER_WORD = "{folder}"
_LOOK_S = 0.02
_CUT_S = 8.0  # a host counts as lost after 5 s without a message
_STOP_S = 10.0
_RESTARTS = 3


@dataclass(frozen=True)
class DrillKind:
    """A failure that can be rehearsed.

    Attributes:
        name: as `--failures` has it.
        what: what is done.
        strike: the kind of `Fault`; "" where the command itself acts.
        again: whether a launcher that the fault ends is started again by the same command, as a scheduler does it.
        several: whether it needs several hosts.
    """

    name: str
    what: str
    strike: str
    again: bool = False
    several: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        DrillKind("rank", "SIGKILL to a rank", "kill"),
        DrillKind("hang", "SIGSTOP to a rank", "stop"),
        DrillKind("host", "SIGKILL to a host's launcher", "kill-launcher", again=True),
        DrillKind("preempt", "SIGTERM to a launcher", "preempt", again=True),
        DrillKind("link", f"a host's link cut for {_CUT_S:g} s", "", several=True),
    )
}


@dataclass(frozen=True)
class RehearsedJob:
    """The job as its user starts it.

    Attributes:
        options: words of `paceline launch` before the script.
        kind: "script" or "module".
        script, args: the script and its arguments, in which `{folder}` stands for a folder of the drill.
        nodes: launchers, each of which stands for a host.
        timeout_s: `--timeout-s` of the drill; None for that of the user.
        env: the environment.
    """

    options: tuple[str, ...]
    kind: str
    script: str
    args: tuple[str, ...]
    nodes: int = 1
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def names_folder(self) -> bool:
        """Whether the script is told where to save."""
        return any(FOLDER_WORD in word for word in self.args)


@dataclass(frozen=True)
class Strike:
    """When, where and how a fault strikes."""

    kind: DrillKind
    step: int
    rank: int = 0


@dataclass
class DrillRecord:
    """What happened in a drill.

    Attributes:
        lines: of all processes.
        end: "reached" (the goal), "over" (the script ended), "failed" (the job ended with an error) or "late".
        codes: exit codes of launchers that ended by themselves, in their order.
        struck: when the fault struck, in seconds since the epoch; None before.
        ended: pid -> when the process was first seen not to run any more.
        text: what the launchers and the processes have printed.
    """

    lines: list[DrillLine]
    end: str = ""
    codes: list[int] = field(default_factory=list)
    struck: float | None = None
    ended: dict[int, float] = field(default_factory=dict)
    text: str = ""

    def last_lines(self, number: int) -> str:
        """Returns the last lines of `text`, marked, since they may be an error with a fix of its own."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return "\n".join(f"    | {line}" for line in lines[-number:]) or "    | (nothing)"


class Drill:
    """One run of the job.

    Args:
        job: the job.
        folder: an empty folder for everything that the drill writes.
        strike: the fault; None for the run without one.
    """

    def __init__(self, job: RehearsedJob, folder: Path, strike: Strike | None = None) -> None:
        self._job = job
        self._folder = folder
        self._strike = strike
        self._reader = LineReader(folder)
        self._record = DrillRecord(self._reader.lines)
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._cable: HostsWithCable | None = None
        self._mends_at: float | None = None
        # When the fault was over; None before that.
        self._counts_from: float | None = 0.0 if strike is None else None
        self._env = {**job.env, "PACELINE_RUN_SECRET": secrets.token_hex(32)}
        # Nobody else is given this port in the seconds until a launcher listens there.
        self._held_port = host.hold_port(0)

    def run(self, reached: Callable[[Sequence[DrillLine], float], bool], limit_s: float) -> DrillRecord:
        """Runs the job to its goal, or until it ends by itself, or `limit_s` is over.

        Args:
            reached: returns whether the goal is reached, given all lines, and when the fault was over.
            limit_s: seconds.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        kind = None if self._strike is None else self._strike.kind
        try:
            if kind is KINDS["link"]:
                self._cable = HostsWithCable(self._job.nodes)
            self._launchers = [self._start(node) for node in range(self._job.nodes)]
            self._record.end = self._follow(reached, time.monotonic() + limit_s)
        finally:
            self._stop()
            self._held_port.close()
            if self._cable is not None:
                self._cable.remove()
        self._reader.poll()
        self._record.lines = self._reader.lines
        outputs = sorted(self._folder.glob("launcher-*.txt"))
        self._record.text = "\n".join(path.read_text(errors="replace") for path in outputs)
        return self._record

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        job = self._job
        words = [sys.executable, "-m", "paceline", "launch", *job.options, "--max-restarts", str(_RESTARTS)]
        if job.timeout_s is not None:
            words += ["--timeout-s", f"{job.timeout_s:g}"]
        if job.nodes > 1:
            address = "127.0.0.1" if self._cable is None else self._cable.address(0)
            port = self._held_port.getsockname()[1]
            words += ["--node-rank", str(node), "--main-address", address, "--main-port", str(port)]
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        args = [word.replace(FOLDER_WORD, str(data)) for word in job.args]
        words += ["-m", "paceline_lens.rehearse.job_in_drill", str(self._orders(data).save()), job.script, *args]
        if self._cable is not None:
            words = [*self._cable.prefix(node), *words]
        with (self._folder / f"launcher-{node}.txt").open("ab") as output:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env, start_new_session=True
            )

    def _orders(self, data: Path) -> DrillOrders:
        apart = "" if self._job.names_folder else str(data)
        if self._strike is None:
            return DrillOrders(str(self._folder), apart, self._job.kind)
        strike = self._strike
        return DrillOrders(str(self._folder), apart, self._job.kind, strike.kind.strike, strike.rank, strike.step)

    def _follow(self, reached: Callable[[Sequence[DrillLine], float], bool], deadline: float) -> str:
        while True:
            new = self._reader.poll()
            self._look_at_processes()
            self._act_on_link()
            for line in new:
                if line.event == "strikes":
                    self._record.struck = self._counts_from = line.t
            if new and self._counts_from is not None and reached(self._reader.lines, self._counts_from):
                return "reached"
            end = self._look_at_launchers()
            if end:
                return end
            if time.monotonic() > deadline:
                return "late"
            time.sleep(_LOOK_S)

    def _look_at_processes(self) -> None:
        """Notes which processes have ended since the last look."""
        for line in self._reader.lines:
            if line.event == "ready" and line.pid not in self._record.ended and not _lives(line.pid):
                self._record.ended[line.pid] = time.time()

    def _act_on_link(self) -> None:
        """Cuts the link when the first rank has done the step, and mends it later."""
        if self._cable is None or self._strike is None:
            return
        if self._record.struck is None and _last_step(self._reader.lines) >= self._strike.step:
            self._cable.cut()
            self._record.struck = time.time()
            self._mends_at = time.monotonic() + _CUT_S
        elif self._mends_at is not None and time.monotonic() > self._mends_at:
            self._mends_at = None
            self._cable.mend()
            self._counts_from = time.time()

    def _look_at_launchers(self) -> str:
        """Starts launchers again where the fault wants it; returns how the job has ended, "" while it goes on."""
        again = self._strike is not None and self._strike.kind.again and self._record.struck is not None
        running = False
        for node, launcher in enumerate(self._launchers):
            code = launcher.poll()
            if code is None:
                running = True
            elif again and code in (-signal.SIGKILL, PREEMPTED) and self._record.codes.count(code) < self._job.nodes:
                self._record.codes.append(code)
                self._launchers[node] = self._start(node)
                running = True
            elif code != 0:
                self._record.codes.append(code)
                return "failed"
        return "" if running else "over"

    def _stop(self) -> None:
        """Ends all launchers that still run. The second SIGTERM says that no save is wanted."""
        running = [launcher for launcher in self._launchers if launcher.poll() is None]
        for _ in range(2):
            for launcher in running:
                with suppress(ProcessLookupError):
                    launcher.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        for launcher in running:
            try:
                launcher.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _last_step(lines: Sequence[DrillLine]) -> int:
    steps = [line.values["step"] for line in lines if line.event == "step" and line.rank == 0]
    return steps[-1] if steps else -1


def _lives(pid: int) -> bool:
    """Returns whether a process runs; one that has ended but was not waited for does not."""
    return process_exists(pid) and process_state(pid) not in ("Z", "X")
