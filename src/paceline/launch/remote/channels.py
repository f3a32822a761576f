"""The starter's end of the conversations with `remote.py`: one connection to each host, all asked at the same time.

`Channels` are the conversations themselves, which `paceline doctor` has too, with a program of its own; `HostChannels` are
those of a run:

prepare: assignment to all -> who lacks what -> one error for all of them, or where node 0 is reached by the others
follow:  go to all -> their lines on this terminal -> their exit codes; signals are passed on
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.base.errors import LaunchError
from paceline.launch.launcher import Job
from paceline.launch.processes.output import show
from paceline.launch.processes.signals import Signals
from paceline.launch.remote.agent import MARK
from paceline.launch.remote.assignment import Assignment

_HEARTBEAT_S = 5.0
_AFTER_FAILURE_S = 5.0  # the launchers end each other; one that never joined them has to be asked
_LOST = 255  # what ssh returns where it is ssh that fails
Place = tuple[str, int]

_REASONS = (  # (what ssh says, what it means); the first that is found counts
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: somebody else may be answering, or it was "
     "set up anew (then `ssh-keygen -R {host}`)"),
    ("Host key verification failed", "its host key is not known: connect once with `ssh {host}` and compare it"),
    ("Could not resolve hostname", "there is no host of that name"),
    ("Connection refused", "it refuses connections{port}: no sshd listens there"),
    ("Permission denied", "permission denied: it does not accept this user's key (`ssh-copy-id {host}`)"),
    ("No module named 'paceline.doctor", "its paceline is older than this one, and has no doctor"),
    ("No module named 'paceline", "paceline is not installed for {python} there"),
    ("Connection timed out", "it cannot be reached{port}: no answer"),
    ("No route to host", "it cannot be reached{port}: no route to it"),
    ("Network is unreachable", "it cannot be reached{port}: no network leads there"),
)  # fmt: skip


class Conversation:
    """What one host says: answers to messages, and lines for the terminal.

    Attributes:
        host: its name.
        answers: what it has answered and nobody has read yet.
        output_before: what it, or ssh, has said besides before the run began.
        begun: whether the run has begun: from then on its output is shown.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.answers: list[dict[str, Any]] = []
        self.output_before = ""
        self.begun = False
        self._partial_lines = {1: b"", 2: b""}

    def receive(self, stream: int, data: bytes) -> None:
        """Takes in what has come over standard output (1) or standard error (2); no data is the end of a stream."""
        *lines, self._partial_lines[stream] = (self._partial_lines[stream] + data).split(b"\n")
        if not data and self._partial_lines[stream]:
            lines.append(self._partial_lines[stream])
        for line in lines:
            text = line.decode(errors="replace")
            if stream == 1 and text.startswith(MARK):
                self.answers.append(json.loads(text.removeprefix(MARK)))
            elif self.begun:
                show(sys.stdout if stream == 1 else sys.stderr, line + b"\n")
            else:
                self.output_before += text + "\n"


class HostChannel(Conversation):
    """A connection to one host: messages in JSON to it, answers and output from it.

    Attributes:
        code: exit code of the program that carries the connection; None while it runs.
    """

    def __init__(self, host: str, command: Sequence[str]) -> None:
        super().__init__(host)
        # In a session of its own: Ctrl-C is for us to pass on. If we die, it reads the end of its input.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None, "it was started with pipes"
        self._input = stdin
        self.pipes = {1: stdout, 2: stderr}
        self.open_pipes = 2

    @property
    def code(self) -> int | None:
        """How the connection ended."""
        return self._process.poll() if self.open_pipes == 0 else None

    def send(self, message: dict[str, Any] | None) -> None:
        """Sends a message; None is a sign of life."""
        line = b"" if message is None else json.dumps(message, default=str).encode()
        with suppress(BrokenPipeError):  # how it ended is seen by reading
            self._input.write(line + b"\n")
            self._input.flush()

    def receive(self, stream: int, data: bytes) -> None:
        """As of `Conversation`; counts the streams that are open."""
        super().receive(stream, data)
        if not data:
            self.open_pipes -= 1

    def why_silent(self, port: int | None, python: str, timeout_s: float) -> str:
        """Why it has not answered."""
        if self.code is None:
            return f"it did not answer within {timeout_s:g} s"
        for output, meaning in _REASONS:
            if output in self.output_before:
                return meaning.format(host=self.host, port=f" at port {port}" if port else "", python=python)
        if self.code == 127:
            return f"there is no {python} there"
        last_words = self.output_before.split()[-40:]
        return f"exit code {self.code}: {' '.join(last_words) or 'nothing was said'}"

    def close_input(self) -> None:
        """Says that nothing more comes, which ends whatever listens to it there."""
        with suppress(BrokenPipeError):
            self._input.close()

    def close(self) -> None:
        """Ends the connection, and with it whatever listens to it there."""
        self.close_input()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in self.pipes.values():
            pipe.close()


class Channels:
    """Conversations with several programs, which are all asked at the same time.

    Args:
        names: what each is called, a host's name for example.
        commands: what starts each, or carries the connection to it.
        port: of the hosts' sshds, for messages; None where ssh knows it.
    """

    def __init__(self, names: Sequence[str], commands: Sequence[Sequence[str]], port: int | None = None) -> None:
        self.channels = [HostChannel(name, command) for name, command in zip(names, commands, strict=True)]
        self._port = port
        self._selector = selectors.DefaultSelector()
        for channel in self.channels:
            for stream, pipe in channel.pipes.items():
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (channel, stream))

    def exchange(
        self, messages: Mapping[int, dict[str, Any]], timeout_s: float
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """Sends messages to some of them, by number; gives what each answers, and why each of the others is silent."""
        asked = {number: self.channels[number] for number in messages}
        for number, channel in asked.items():
            channel.send(messages[number])
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            waiting = [channel for channel in asked.values() if not channel.answers and channel.code is None]
            if not waiting:
                break
            self._read(0.2)
        answers: dict[int, dict[str, Any]] = {}
        silent: dict[int, str] = {}
        for number, channel in asked.items():
            if channel.answers:
                answers[number] = channel.answers.pop(0)
            else:
                silent[number] = channel.why_silent(self._port, sys.executable, timeout_s)
        return answers, silent

    def _read(self, seconds: float) -> None:
        for event, _ in self._selector.select(seconds):
            channel, stream = event.data
            data = os.read(event.fd, 1 << 16)
            channel.receive(stream, data)
            if not data:
                self._selector.unregister(event.fileobj)
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.05))

    def close(self) -> None:
        """Ends all connections."""
        for channel in self.channels:  # all hosts end at the same time
            channel.close_input()
        for channel in self.channels:
            channel.close()
        self._selector.close()


class HostChannels(Channels):
    """The connections to all hosts of a job.

    Args:
        job: the job, with its assignment.
        commands: what carries each connection, by host.
    """

    def __init__(self, job: Job, commands: Sequence[Sequence[str]]) -> None:
        self.job = job
        self.assignment = job.assigned
        self.hosts = [host.host for host in self.assignment.hosts]
        super().__init__(self.hosts, commands, job.reach.port)

    def prepare(self) -> Place | None:
        """Gives all hosts their assignment; returns where node 0 will listen, or None where there is no other host.

        Raises:
            LaunchError: `launch-hosts`, with what keeps each host from taking part.
        """
        message = self.assignment.to_message()
        ready = self.ask({node: {"orders": message, "node": node} for node in range(len(self.hosts))})
        self._raise_if_any({node: ready[node]["problems"] for node in ready})
        return place_of_node_0(self.job, ready, self.ask, self._raise_if_any)

    def ask(self, messages: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Sends messages to hosts, and gives what each answers.

        Raises:
            LaunchError: `launch-hosts`, where some do not.
        """
        answers, silent = self.exchange(messages, self.job.reach.timeout_s)
        problems = {node: [reason] for node, reason in silent.items()}
        if problems:  # those that have answered may lack something too: one error tells of all
            for node, answer in answers.items():
                problems[node] = answer.get("problems", [])
            self._raise_if_any(problems)
        return answers

    def _raise_if_any(self, problems: Mapping[int, list[str]]) -> None:
        """Raises one error for all hosts that cannot take part, if any."""
        unfit, lines = unfit_hosts(self.hosts, problems)
        if unfit:
            raise unfit_hosts_error(self.assignment, unfit, lines)

    def follow(self, place: Place | None) -> int:
        """Has all hosts begin, shows what they write, and waits for their end; returns the first exit code that is not 0.

        Raises:
            LaunchError: `launch-host-lost`, where a connection ends before its host has.
        """
        signals = Signals(self._signal)
        signals.enter()
        for channel in self.channels:
            channel.begun = True
            channel.send({"go": place})
        codes: dict[str, int] = {}  # of those that have ended, in that order
        last_heartbeat = time.monotonic()
        end_at = float("inf")
        try:
            while len(codes) < len(self.channels):
                self._read(0.2)
                for channel in self.channels:
                    code = channel.code
                    if channel.host in codes or code is None:
                        continue
                    codes[channel.host] = code
                    if code and end_at == float("inf"):
                        end_at = time.monotonic()
                        end_at += 0.0 if code == _LOST else _AFTER_FAILURE_S
                for number in signals.take_new():
                    end_at = float("inf")
                    self._signal(number)
                now = time.monotonic()
                if now >= end_at:
                    end_at = float("inf")
                    self._signal(signal.SIGTERM)
                if now - last_heartbeat > _HEARTBEAT_S:
                    last_heartbeat = now
                    for channel in self.channels:
                        channel.send(None)
        finally:
            signals.leave()
        failed = [host for host, code in codes.items() if code]
        if not failed:
            return 0
        if codes[failed[0]] == _LOST:
            raise host_lost_error(failed[0])
        return codes[failed[0]]

    def _signal(self, number: int) -> None:
        for channel in self.channels:
            if channel.code is None:
                channel.send({"signal": int(number)})


Messages = Mapping[int, dict[str, Any]]  # by node


def place_of_node_0(
    job: Job,
    ready: Messages,
    ask: Callable[[Messages], Messages],
    raise_if_any: Callable[[Mapping[int, list[str]]], None],
) -> Place | None:
    """Has node 0 listen, and the others try its addresses; returns where it listens, or None where there is no other.

    Args:
        job: the job, with its assignment.
        ready: what the nodes have answered to the assignment.
        ask: sends messages to nodes and gives what each answers.
        raise_if_any: raises one error for the problems of some nodes, if there are any.
    """
    names = [host.host for host in job.assigned.hosts]
    others = range(1, len(names))
    if not others:
        return None
    towards = [ready[node]["address"] for node in others if ready[node]["address"]]
    listens = ask({0: {"listen": job.main_port, "towards": towards}})[0]
    if listens["problem"]:
        raise_if_any({0: [listens["problem"]]})
    port = int(listens["port"])
    candidates = [job.main_address] if job.main_address else [*listens["addresses"], names[0]]
    answers = ask({node: {"reach": [candidates, port]} for node in others})
    for address in candidates:
        if all(address in answer["reached"] for answer in answers.values()):
            return address, port
    # No address serves all hosts: the first one is what most would expect to work.
    problem = f"it does not reach {names[0]} at {', '.join(candidates)} (port {port})"
    unreached = [node for node, answer in answers.items() if candidates[0] not in answer["reached"]]
    raise_if_any({node: [problem] for node in unreached})
    raise AssertionError("an address that nobody misses is one that all reach")


def unfit_hosts(hosts: Sequence[str], problems: Mapping[int, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Hosts that cannot take part, and a line for each reason.

    Args:
        hosts: names of all, by node.
        problems: reasons by node; () where there are none.
    """
    unfit = []
    lines = []
    for node in sorted(problems):
        if problems[node]:
            unfit.append(hosts[node])
            lines += [f"{hosts[node]}: {problem}" for problem in problems[node]]
    return unfit, lines


def unfit_hosts_error(
    assignment: Assignment, hosts: Sequence[str], lines: Sequence[str], leave_out: str = ""
) -> LaunchError:
    """The error where hosts cannot take part.

    Args:
        assignment: what they were to run.
        hosts: who cannot.
        lines: why, each with the name of its host.
        leave_out: the flag that leaves these hosts out; "" for that of a hostfile.
    """
    total = len(assignment.hosts)
    fix = "mend what is named"
    if len(hosts) < total:
        them = "it" if len(hosts) == 1 else "them"
        flag = leave_out or f"--exclude {'@'.join(hosts)}"
        fix += f", or leave {them} out: {flag}"
    return LaunchError(
        "launch-hosts",
        f"{len(hosts)} of {total} host{'s' * (total > 1)} cannot take part; nothing was started on any.",
        why=lines,
        fix=fix,
    )


def host_lost_error(host: str) -> LaunchError:
    """The error where a host was lost on the way."""
    return LaunchError(
        "launch-host-lost",
        f"the connection to {host} was lost.",
        why="ssh has ended, and the host has not said how its processes did; those of the others were ended",
        fix="see whether the host is up and what its own log says, then start again: the script resumes",
    )
