"""The agent on one host of a run that was started from another host: what `ssh`, `mpirun` and `srun` start there.

Below, the starter is the command that the user typed.

    starter  --assignment-->  survey: the agent checks what is missing here, and imports torch
             <--problems----
             --listen------>  node 0 only: it listens, and answers with its port and addresses
             --reach------->  the other nodes: they try these addresses
             --go---------->  fork the launcher of this node, which works as `paceline launch` does
             <--lines-------  the output of the launcher, each line with the name of the host
             --signal------>  passed on to the launcher
    end of input, or no heartbeat: the starter is gone, so the launcher gets SIGTERM and, after its grace period, SIGKILL

Some programs carry messages in another way:

- In a SLURM allocation one srun starts all hosts, and all agents read the same input. Messages have a field "to" with the
  numbers of the nodes, and answers a field "node".
- mpirun, and srun with a hostfile, pass the assignment in a variable, and end their processes themselves.
- On a Ray cluster an actor carries the connection. The agent ends with the process of that actor.
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
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import PacelineError
from paceline.base.terminal import say
from paceline.base.version import VERSION
from paceline.launch import host
from paceline.launch.launcher import LAUNCHERS
from paceline.launch.make_job import job_of, target_of
from paceline.launch.processes.signals import Signals, kill_with_parent
from paceline.launch.rounds import Place
from paceline.world.network.interface import address_towards
from paceline_hosts.assignment import VARIABLE, Assignment, python_version
from paceline_hosts.network.ports import lasting_port

# The prefix of a line that is an answer, and not output of a shell or a script.
MARK = "\x01paceline "
_SILENCE_S = 60.0  # the starter sends a heartbeat every few seconds
_CONNECT_S = 3.0
_LATE_S = 15.0  # how much longer than its grace period a launcher may take to end


class StarterChannel:
    """The connection to the starter: its messages on standard input, our answers on standard output.

    Attributes:
        node: the number of this host, where all hosts share one connection; None where this host has its own.
    """

    def __init__(self) -> None:
        self.node: int | None = None
        self._partial_line = b""
        self._messages: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        """Waits for the next message. At the end of the input this process ends."""
        while not self._messages:
            messages = self.receive_available()
            if messages is None:
                sys.exit(1)
            self._messages = messages
        return self._messages.pop(0)

    def receive_available(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived; [] for none yet, None at the end of the input."""
        data = os.read(0, 1 << 16)
        if not data:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        messages = self._messages
        self._messages = []
        for line in lines:
            if not line:  # an empty line is a heartbeat
                continue
            message = json.loads(line)
            is_to_this_host = self.node is None or "to" not in message or self.node in message["to"]
            if is_to_this_host:
                messages.append(message)
        return messages

    def answer(self, **message: Any) -> None:
        """Sends an answer."""
        if self.node is not None:
            message["node"] = self.node
        os.write(1, (MARK + json.dumps(message) + "\n").encode())


def survey(message: dict[str, Any], node: int) -> list[str]:
    """Changes to the working directory, sets the environment, and returns what is missing here for the assignment.

    Args:
        message: the assignment, perhaps of another version of Paceline.
        node: the number of this host.
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
    launch = assignment.settings.launch
    slots = assignment.hosts[node].ids
    problems = []
    unusable = host.unusable(target_of(launch, assignment.script, assignment.args))
    if unusable is not None:
        problems.append(f"{unusable.what.rstrip('.')} ({unusable.why})")
    if not assignment.settings.run.cpu:
        devices = host.accelerators()
        # Where each host has its own devices, they are numbered from 0, whatever the numbers of the slots are.
        highest = len(slots) - 1 if assignment.own_devices else max(slots)
        if devices.count and highest >= devices.count:
            listed = ",".join(map(str, slots))
            problems.append(f"slots {listed} are asked for, and there are {devices.count} devices")
    return problems


def addresses(towards: list[str]) -> list[str]:
    """The addresses under which others may reach this host: the one that ssh used, those towards the others, and its name."""
    # ssh sets SSH_CONNECTION to the address and port of the client, then those of this host.
    candidates = environment.snapshot().get("SSH_CONNECTION", "").split()[2:3]
    candidates += [own for own in map(address_towards, towards) if own]
    with suppress(OSError, UnicodeError):  # a host's name may be longer than a part of a DNS name
        candidates += [str(row[4][0]) for row in socket.getaddrinfo(host.name(), None, type=socket.SOCK_STREAM)]
    distinct = dict.fromkeys(candidates)
    # At a loopback address another host would reach itself.
    return [address for address in distinct if not address.startswith("127.") and address != "::1"]


def reachable(candidates: list[str], port: int) -> list[str]:
    """Returns the addresses of node 0 that accept a connection from this host."""
    reached = []
    for address in candidates:
        with suppress(OSError, UnicodeError), socket.create_connection((address, port), _CONNECT_S):
            reached.append(address)
    return reached


def serve_starter() -> int:
    """Answers the messages of the starter, then runs the assignment."""
    channel = StarterChannel()
    first = channel.receive()
    assignment = first["orders"]
    node = first["node"]
    if node is None:
        node = channel.node = _node(first)
        environment.export({"SSH_CONNECTION": None})  # srun has copied it from the login node
    try:
        problems = survey(assignment, node)
    except PacelineError as error:
        problems = [str(error)]
    channel.answer(problems=problems, address=next(iter(addresses([])), ""))
    listener: socket.socket | None = None
    while True:
        message = channel.receive()
        if "listen" in message:
            problem = ""
            port = 0
            try:
                listener = host.hold_port(message["listen"] or lasting_port())
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
    return run(Assignment.from_message(assignment), node, message["go"], channel)


def survey_by_variable() -> int:
    """Reports what is missing here for the assignment in the environment."""
    carried = json.loads(environment.snapshot()[VARIABLE])
    message = carried["orders"]
    node = _node(carried)
    StarterChannel().answer(node=node, problems=survey(message, node), addresses=addresses([]))
    return 0


def run_by_variable() -> int:
    """Runs the assignment in the environment."""
    kill_with_parent(os.getppid())
    carried = json.loads(environment.snapshot()[VARIABLE])
    environment.export({VARIABLE: None})
    node = _node(carried)
    survey(carried["orders"], node)
    place = carried["place"]
    return run(Assignment.from_message(carried["orders"]), node, place and (place[0], place[1]), None)


def _node(carried: dict[str, Any]) -> int:
    """Returns the number of this host: as the message says, else by the name that SLURM uses, else as mpirun or srun counts."""
    if carried["node"] is not None:
        return int(carried["node"])
    env = environment.snapshot()
    names = [slots["host"] for slots in carried["orders"]["hosts"]]
    own = env.get("SLURMD_NODENAME", "")
    if own in names:
        return names.index(own)
    return int(env.get("OMPI_COMM_WORLD_RANK") or env.get("SLURM_PROCID") or "0")


def run(assignment: Assignment, node: int, place: Place | None, channel: StarterChannel | None) -> int:
    """Runs the launcher of this host in a forked process, and watches it. Returns its exit code.

    This function also returns in the forked processes, that is in the launcher and its workers, when they end.
    """
    out = os.pipe()
    err = os.pipe()
    watch = LauncherWatch(
        out[0], err[0], f"{assignment.hosts[node].host}: ".encode(), channel, assignment.settings.launch.grace_s
    )
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        kill_with_parent(mine)
        # mpirun and srun signal whole process groups. The launcher must get each signal once, from the agent.
        os.setpgid(0, 0)
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
    """Does on this host what `paceline launch` does."""
    from paceline.launch.failure_report import describe

    try:
        settings = assignment.settings_of(node, place)
        job, notices = job_of(settings, assignment.script, assignment.args, environment.snapshot())
        if node == 0:  # the notices are the same on all hosts
            for notice in notices:
                say(notice)
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
    if outcome.elsewhere:  # the host where it happened reports the failure and returns its exit code
        say(f"stopped, because {outcome.elsewhere}")
        return 0
    if outcome.failure is not None:
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)


class LauncherWatch:
    """Watches the launcher of this host: passes its output to the starter, and signals of the starter to it.

    Args:
        out, err: the pipes with the output of the launcher.
        mark: the prefix of each line.
        channel: the connection to the starter; None where the program that started the agent sends signals itself.
        grace_s: seconds that the launcher gives its processes to end.
    """

    def __init__(self, out: int, err: int, mark: bytes, channel: StarterChannel | None, grace_s: float) -> None:
        self._pipes = {out: 1, err: 2}
        self._parts = {out: b"", err: b""}
        self._mark = mark
        self._channel = channel
        self._grace_s = grace_s
        self._child = 0
        self._signals = Signals(lambda number: self._send(number))
        self._signals.enter()
        self._last_heard_at = time.monotonic()
        self._kill_at = float("inf")

    def leave(self) -> None:
        """In the forked process: restores the signal handlers."""
        self._signals.leave()

    def until_end_of(self, child: int) -> int:
        """Waits for the end of the launcher. Returns its exit code, with 128 + N for signal N."""
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
                self._lose(f"the host that started the run has sent nothing for {_SILENCE_S:g} s")
            if status is None:
                pid, waited = os.waitpid(child, os.WNOHANG)
                status = waited if pid else None
                if status is None and time.monotonic() > self._kill_at:
                    self._send(signal.SIGKILL)
        self._signals.leave()
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return 128 - code  # ended by a signal, whose number Python gives as a negative one
        return code

    def _listen(self) -> bool:
        """Passes on the signals that the starter has sent. Returns whether it is still there."""
        assert self._channel is not None, "called only with a connection"
        messages = self._channel.receive_available()
        self._last_heard_at = time.monotonic()
        if messages is None:
            self._lose("the connection to the host that started the run was closed")
            return False
        for message in messages:
            self._send(message["signal"])
        return True

    def _lose(self, why: str) -> None:
        """The starter is gone: asks the launcher to end, and kills it after its grace period."""
        self._channel = None
        self._write(2, self._mark + f"paceline: {why}; all processes on this host are stopped\n".encode())
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s + _LATE_S

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _copy(self, pipe: int) -> None:
        """Passes on whole lines, and at the end of the stream the rest."""
        data = os.read(pipe, 1 << 16)
        lines = (self._parts[pipe] + data).splitlines(keepends=True)
        self._parts[pipe] = b""
        # A line that has no end yet waits for its rest. At the end of the stream there is no rest, so it gets an end. A "\r" of
        # a progress bar counts as an end, so that the bar moves.
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            if data:
                self._parts[pipe] = lines.pop()
            else:
                lines[-1] += b"\n"
        self._write(self._pipes[pipe], b"".join(self._mark + line for line in lines))
        if not data:
            os.close(pipe)
            del self._pipes[pipe]

    @staticmethod
    def _write(number: int, data: bytes) -> None:
        with suppress(BrokenPipeError):  # the starter is gone, but the processes may still save a checkpoint
            while data:
                data = data[os.write(number, data) :]


def main(words: list[str]) -> int:
    """Runs the agent.

    Args:
        words: how the assignment arrives: [] by messages on standard input; ["attached"] the same, and this process ends
            with its parent; ["survey"] and ["run"] in the environment.
    """
    if words == ["survey"]:
        return survey_by_variable()
    if words == ["run"]:
        return run_by_variable()
    if words == ["attached"]:
        kill_with_parent(os.getppid())
        restore_signals()
    return serve_starter()


def restore_signals() -> None:
    """Unblocks the signals that this process has inherited as blocked or ignored.

    Ray blocks Ctrl-C in all processes that it starts, and it is ignored where Ray was started in the background. The processes
    of this host need it: the starter sends it as a message.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
