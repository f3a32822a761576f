"""One host's part of a run that was started from another one: what `ssh`, `pdsh`, `mpirun` and `srun` start there.

    starter              --assignment-->  survey: what is missing here?   (imports torch meanwhile)
                         <--ready---
                         --listen-->  node 0: a port    --reach-->  the others: which of its addresses answers?
                         ---go----->  fork: the launcher of this node, as `paceline launch` would be
                         <--lines---  its output, marked with the host's name
                         --signal-->  passed on
    end of input, or silence          the starter is gone: all of this host is asked to end, then made to

Within an allocation of SLURM's one srun starts all hosts, and all of them read the same input: messages say "to" whom they
are, answers from which "node" they come. With `pdsh`, which passes no input on, the assignment is kept in a file that only
this user can read until the host is started. mpirun, and srun with a hostfile, bring it in a variable, and end their
processes themselves. Where a process of this host carries the connection (Ray's), this host's part ends with that process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import PacelineError
from paceline.base.temporary import temporary_folder
from paceline.base.version import VERSION
from paceline.launch import host
from paceline.launch.job import job_of, target_of
from paceline.launch.launcher import LAUNCHERS
from paceline.launch.processes.signals import Signals, kill_with_parent
from paceline.launch.remote.assignment import VARIABLE, Assignment, python_version

MARK = "\x01paceline "  # before a line that is an answer, and neither a shell's greeting nor a script's output
_SILENCE_S = 60.0  # the starter gives a sign of life every few seconds
_CONNECT_S = 3.0
_LATE_S = 15.0  # how much longer than its grace period a launcher may take
Place = tuple[str, int]


class StarterChannel:
    """The connection to the starter: its messages on standard input, our answers on standard output.

    Attributes:
        node: which host this is, where all hosts share one connection; None where it is this host's own.
    """

    def __init__(self) -> None:
        self.node: int | None = None
        self._partial_line = b""
        self._messages: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        """The next message; ends this process where there is none."""
        while not self._messages:
            messages = self.receive_available()
            if messages is None:
                sys.exit(1)
            self._messages = messages
        return self._messages.pop(0)

    def receive_available(self) -> list[dict[str, Any]] | None:
        """What has come, without waiting for a whole message; None at the end of the input."""
        data = os.read(0, 1 << 16)
        if not data:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        received = [json.loads(line) for line in lines if line]  # an empty line is a sign of life
        messages = [*self._messages, *(message for message in received if self._is_to_this_host(message))]
        self._messages = []
        return messages

    def _is_to_this_host(self, message: dict[str, Any]) -> bool:
        return self.node is None or "to" not in message or self.node in message["to"]

    def answer(self, **message: Any) -> None:
        """Sends an answer."""
        if self.node is not None:
            message["node"] = self.node
        os.write(1, (MARK + json.dumps(message) + "\n").encode())


def survey(message: dict[str, Any], node: int) -> list[str]:
    """Goes to the working directory, takes over the environment, and says what is missing here for the assignment.

    Args:
        message: the assignment, perhaps of another version.
        node: which host this is.
    """
    if message["version"] != VERSION:
        return [f"paceline is {VERSION} there, and {message['version']} here"]
    if message["python"] != python_version():
        return [f"Python is {python_version()} there, and {message['python']} here"]
    assignment = Assignment.from_message(message)
    try:
        os.chdir(assignment.cwd)
    except OSError as error:
        return [f"the working directory {assignment.cwd} is not there ({(error.strerror or '').lower()})"]
    environment.export(dict(assignment.env))
    launch, slots = assignment.settings.launch, assignment.hosts[node].ids
    problems = []
    unusable = host.unusable(target_of(launch, assignment.script, assignment.args))
    if unusable is not None:
        problems.append(f"{unusable.what.rstrip('.')} ({unusable.why})")
    if not assignment.settings.run.cpu:
        devices = host.accelerators()
        highest = len(slots) - 1 if assignment.own_devices else max(slots)
        if devices.count and highest >= devices.count:
            listed = ",".join(map(str, slots))
            problems.append(f"slots {listed} are asked for, and there are {devices.count} devices")
    return problems


def addresses(towards: list[str]) -> list[str]:
    """Under which addresses this host may be reached: as the starter reached it, and as it goes to the others."""
    candidates = environment.snapshot().get("SSH_CONNECTION", "").split()[2:3]
    candidates += [own for own in map(host.address_towards, towards) if own]
    with suppress(OSError, UnicodeError):  # a host's name may be longer than a part of a DNS name
        candidates += [str(row[4][0]) for row in socket.getaddrinfo(host.name(), None, type=socket.SOCK_STREAM)]
    distinct = dict.fromkeys(candidates)
    return [address for address in distinct if not address.startswith("127.") and address != "::1"]


def reachable(candidates: list[str], port: int) -> list[str]:
    """Which of node 0's addresses answer."""
    reached = []
    for address in candidates:
        with suppress(OSError, UnicodeError), socket.create_connection((address, port), _CONNECT_S):
            reached.append(address)
    return reached


def serve_starter() -> int:
    """Answers the starter, then runs what it has assigned."""
    channel = StarterChannel()
    first = channel.receive()
    assignment, node = first["orders"], first["node"]
    if node is None:
        node = channel.node = _node(first)
        environment.export({"SSH_CONNECTION": None})  # of the login node, from which srun has brought it
    try:
        problems = survey(assignment, node)
    except PacelineError as error:
        problems = [str(error)]
    channel.answer(problems=problems, address=next(iter(addresses([])), ""))
    listener: socket.socket | None = None
    while True:
        message = channel.receive()
        if "listen" in message:
            problem, port = "", 0
            try:
                listener = host.hold_port(message["listen"] or host.lasting_port())
                listener.listen(128)
                port = listener.getsockname()[1]
            except OSError as error:
                problem = f"port {message['listen']} cannot be used there ({(error.strerror or '').lower()})"
            channel.answer(port=port, addresses=addresses(message["towards"]), problem=problem)
        elif "reach" in message:
            channel.answer(reached=reachable(*message["reach"]))
        else:
            break
    if listener is not None:
        listener.close()
    if "store" in message:
        store(message["store"], {"orders": assignment, "node": node, "place": message["place"]})
        channel.answer(stored=True)
        return 0
    return run(Assignment.from_message(assignment), node, message["go"], channel)


def store(name: str, carried: dict[str, Any]) -> None:
    """Stores an assignment in a file of this user alone."""
    path = Path(temporary_folder(), name)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(carried, file)


def run_stored(name: str) -> int:
    """Runs an assignment that was stored."""
    path = Path(temporary_folder(), name)
    try:
        carried = json.loads(path.read_text())
    except FileNotFoundError:
        return 1  # asked a second time: the first one has taken it
    path.unlink()
    return _run_carried(carried, carried["node"], StarterChannel())


def survey_by_variable() -> int:
    """Says what is missing here, where a batch system has started this for a first look."""
    carried = json.loads(environment.snapshot()[VARIABLE])
    message, node = carried["orders"], _node(carried)
    StarterChannel().answer(node=node, problems=survey(message, node), addresses=addresses([]))
    return 0


def run_by_variable() -> int:
    """Runs an assignment where a batch system has started this."""
    kill_with_parent(os.getppid())
    carried = json.loads(environment.snapshot()[VARIABLE])
    environment.export({VARIABLE: None})
    return _run_carried(carried, _node(carried), None)


def _run_carried(carried: dict[str, Any], node: int, channel: StarterChannel | None) -> int:
    """Runs an assignment that came with the place of node 0."""
    survey(carried["orders"], node)
    place = carried["place"]
    return run(Assignment.from_message(carried["orders"]), node, place and (place[0], place[1]), channel)


def _node(carried: dict[str, Any]) -> int:
    """Which of the hosts this is: as the launcher says, else as SLURM names it, else by the number that mpirun or srun gave."""
    if carried["node"] is not None:
        return int(carried["node"])
    env = environment.snapshot()
    names = [slots["host"] for slots in carried["orders"]["hosts"]]
    own = env.get("SLURMD_NODENAME", "")
    number = env.get("OMPI_COMM_WORLD_RANK") or env.get("SLURM_PROCID") or "0"
    return names.index(own) if own in names else int(number)


def run(assignment: Assignment, node: int, place: Place | None, channel: StarterChannel | None) -> int:
    """Runs this host's part to its end, in a process of its own that is watched by this one; returns its exit code.

    A forked process, be it the launcher or one of its workers, comes back from here too, at its own end.
    """
    out, err = os.pipe(), os.pipe()
    watch = Watch(
        out[0], err[0], f"{assignment.hosts[node].host}: ".encode(), channel, assignment.settings.launch.grace_s
    )
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        kill_with_parent(mine)
        os.setpgid(0, 0)  # mpirun and srun signal whole groups: it is to get each signal once, through this one
        watch.leave()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, (read, write) in ((1, out), (2, err)):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        return _launch(assignment, node, place)
    os.close(out[1])
    os.close(err[1])
    code = watch.until_end_of(child)
    if channel is not None and channel.node is not None:
        with suppress(BrokenPipeError):
            channel.answer(end=code)
    return code


def _launch(assignment: Assignment, node: int, place: Place | None) -> int:
    """What `paceline launch` does on this host."""
    from paceline.launch.failure_report import describe

    try:
        settings = assignment.settings_of(node, place)
        job, notices = job_of(settings, assignment.script, assignment.args, environment.snapshot())
        for notice in notices if node == 0 else ():  # hosts are alike: once is enough
            print(f"paceline: {notice}", file=sys.stderr, flush=True)
        everything = dict.fromkeys(range(job.procs), 3)
        target = replace(job.target, local_rank=assignment.local_rank)
        job = replace(job, tee=job.tee or everything, target=target, secret=assignment.secret)
        local = LAUNCHERS.get("local")
        outcome = local.submit(local.render(job)).wait()
    except PacelineError as error:
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    if outcome.in_worker:
        return int(outcome.exit_code)
    if outcome.elsewhere:  # it is told, and counted, where it happened
        print(f"paceline: stopped, as {outcome.elsewhere}", file=sys.stderr, flush=True)
        return 0
    if outcome.failure is not None:
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)


class Watch:
    """Watches a launcher: passes its output on, and what it is told by the starter.

    Args:
        out, err: what it reads the launcher's output from.
        mark: stands before each line.
        channel: the connection to the starter; None where whoever started this process looks after it by signals.
        grace_s: seconds that the launcher gives its processes.
    """

    def __init__(self, out: int, err: int, mark: bytes, channel: StarterChannel | None, grace_s: float) -> None:
        self._pipes = {out: 1, err: 2}
        self._parts = {out: b"", err: b""}
        self._mark, self._channel, self._grace_s = mark, channel, grace_s
        self._child = 0
        self._signals = Signals(lambda number: self._send(number))
        self._signals.enter()
        self._last_heard_at = time.monotonic()
        self._kill_at = float("inf")

    def leave(self) -> None:
        """In the forked process: drops what is this one's."""
        self._signals.leave()

    def until_end_of(self, child: int) -> int:
        """Waits for its end; returns its exit code, as a shell counts."""
        self._child = child
        status: int | None = None
        beats = False
        while status is None or self._pipes:
            inputs = [*self._pipes, self._signals.read, *([0] if self._channel else [])]
            for readable in select.select(inputs, [], [], 0.5)[0]:
                if readable in self._pipes:
                    self._copy(readable)
                elif readable == 0:
                    beats = self._listen() or beats
                else:
                    os.read(readable, 64)
            for number in self._signals.take_new():
                self._send(number)
            if self._channel is not None and beats and time.monotonic() - self._last_heard_at > _SILENCE_S:
                self._lose(f"nothing was heard from where the run was started for {_SILENCE_S:g} s")
            if status is None:
                pid, waited = os.waitpid(child, os.WNOHANG)
                status = waited if pid else None
                if status is None and time.monotonic() > self._kill_at:
                    self._send(signal.SIGKILL)
        self._signals.leave()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _listen(self) -> bool:
        """Does what the starter says; whether it gives signs of life."""
        assert self._channel is not None, "somebody is listened to"
        messages = self._channel.receive_available()
        self._last_heard_at = time.monotonic()
        if messages is None:
            self._lose("the connection to where the run was started has ended")
            return False
        for message in messages:
            self._send(message["signal"])
        return True

    def _lose(self, why: str) -> None:
        """Nobody is left who would hear more: all here is asked to end, and made to."""
        self._channel = None
        self._write(2, self._mark + f"paceline: {why}: ending all on this host\n".encode())
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s + _LATE_S

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _copy(self, pipe: int) -> None:
        """Passes whole lines on; at the end what is left."""
        data = os.read(pipe, 1 << 16)
        lines = (self._parts[pipe] + data).splitlines(keepends=True)
        self._parts[pipe] = lines.pop() if data and lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            lines[-1] += b"\n"
        self._write(self._pipes[pipe], b"".join(self._mark + line for line in lines))
        if not data:
            os.close(pipe)
            del self._pipes[pipe]

    @staticmethod
    def _write(number: int, data: bytes) -> None:
        with suppress(BrokenPipeError):  # nobody is there to read, and the run may still have to save
            while data:
                data = data[os.write(number, data) :]


def main(words: list[str]) -> int:
    """Runs what the words say: nothing for a starter that asks, else how the assignment comes."""
    if words[:1] == ["stored"]:
        return run_stored(words[1])
    if words == ["survey"]:
        return survey_by_variable()
    if words == ["run"]:
        return run_by_variable()
    if words == ["attached"]:
        kill_with_parent(os.getppid())
        hear_signals()
    return serve_starter()


def hear_signals() -> None:
    """Undoes what was inherited: Ray blocks Ctrl-C in all that it starts, and whoever started Ray in the background ignores it.

    Signals come here as messages, and this host's processes are to hear them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
