"""The connections from the command that starts a run to the agent (`agent.py`) on each host.

`Channels` sends messages to several programs at the same time and collects their answers; `paceline doctor` uses it too.
`RunChannels` adds what a run needs:

prepare: send the assignment -> each host reports what is missing -> one error for all, or the address of node 0
follow:  tell all hosts to start -> show their output -> collect their exit codes; pass signals on
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.base.errors import LaunchError
from paceline.launch.job import Job
from paceline.launch.launcher import Outcome
from paceline.launch.processes.output import show
from paceline.launch.processes.signals import Signals
from paceline.launch.rounds import Place
from paceline_hosts.assignment import assignment_of
from paceline_hosts.remote.agent import MARK

Messages = Mapping[int, dict[str, Any]]  # by the number of the node

_HEARTBEAT_S = 5.0
# After a failure the launchers stop each other. A launcher that never joined the others is told to end after this time.
_AFTER_FAILURE_S = 5.0
_LOST = 255  # the exit code of ssh where ssh itself fails

# What ssh prints, and what it means. The first entry that is found counts.
_REASONS = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: another host may be answering, or the host "
     "was reinstalled (then run `ssh-keygen -R {host}`)"),
    ("Host key verification failed", "its host key is not known: connect once with `ssh {host}` and compare it"),
    ("Could not resolve hostname", "there is no host of that name"),
    ("Connection refused", "it refuses connections{port}: no sshd listens there"),
    ("Permission denied", "permission denied: it does not accept this user's key (`ssh-copy-id {host}`)"),
    ("No module named 'paceline_hosts.doctor", "its paceline is older than this one, and has no doctor"),
    ("No module named 'paceline", "paceline is not installed for {python} there"),
    ("Connection timed out", "it cannot be reached{port}: no answer"),
    ("No route to host", "it cannot be reached{port}: no route to it"),
    ("Network is unreachable", "it cannot be reached{port}: no network leads there"),
)  # fmt: skip


def line_of(message: Mapping[str, Any] | None) -> bytes:
    """A message to an agent as a line; None is a heartbeat, which is an empty line."""
    text = "" if message is None else json.dumps(message, default=str)
    return text.encode() + b"\n"


class Conversation:
    """What one host sends: answers to messages, and lines for the terminal.

    Attributes:
        host: the name of the host.
        answers: answers that were not taken out yet.
        output_before: other output of the host, or of ssh, before the run has begun. It explains why a host does not answer.
        begun: whether the run has begun. From then on the output of the host is shown.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.answers: list[dict[str, Any]] = []
        self.output_before = ""
        self.begun = False
        self._partial_lines = {1: b"", 2: b""}

    def receive(self, stream: int, data: bytes) -> None:
        """Takes in data from standard output (1) or standard error (2). Empty data means the end of the stream."""
        # Data arrives in pieces that may end within a line. The rest of that line follows with the next piece.
        lines = (self._partial_lines[stream] + data).split(b"\n")
        self._partial_lines[stream] = lines.pop()
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
    """A connection to one host, carried by a program such as ssh. Messages and answers are JSON, one a line.

    Attributes:
        code: the exit code of that program; None while it runs.
    """

    def __init__(self, host: str, command: Sequence[str]) -> None:
        super().__init__(host)
        # In its own session, because Ctrl-C travels as a message. If this process dies, the program reads the end of its input.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        stdin = self._process.stdin
        stdout = self._process.stdout
        stderr = self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None, "it was started with pipes"
        self._input = stdin
        self.pipes = {1: stdout, 2: stderr}
        self.open_pipes = 2

    @property
    def code(self) -> int | None:
        """The exit code of the program; None while it runs."""
        # The program may have ended while some of its output is still unread. It counts as running until all is read, so that
        # no answer and no line is lost.
        if self.open_pipes > 0:
            return None
        return self._process.poll()

    def send(self, message: dict[str, Any] | None) -> None:
        """Sends a message; None is a heartbeat."""
        with suppress(BrokenPipeError):  # reading shows how the connection ended
            self._input.write(line_of(message))
            self._input.flush()

    def receive(self, stream: int, data: bytes) -> None:
        """As `Conversation.receive`; also counts the streams that are open."""
        super().receive(stream, data)
        if not data:
            self.open_pipes -= 1

    def why_silent(self, port: int | None, python: str, timeout_s: float) -> str:
        """Returns the reason why the host has not answered."""
        if self.code is None:
            return f"it did not answer within {timeout_s:g} s"
        at_port = f" at port {port}" if port else ""
        for output, meaning in _REASONS:
            if output in self.output_before:
                return meaning.format(host=self.host, port=at_port, python=python)
        if self.code == 127:  # a shell's exit code for a command that does not exist
            return f"there is no {python} there"
        last_words = self.output_before.split()[-40:]
        return f"exit code {self.code}: {' '.join(last_words) or 'no output'}"

    def close_input(self) -> None:
        """Closes the input of the program, which ends the agent that reads it."""
        with suppress(BrokenPipeError):
            self._input.close()

    def close(self) -> None:
        """Ends the connection, and the agent at its other end."""
        self.close_input()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in self.pipes.values():
            pipe.close()


class Channels:
    """Connections to several programs, which are all served at the same time.

    Args:
        names: a name for each, such as that of its host.
        commands: the command that carries each connection.
        port: the port of sshd on the hosts, for error messages; None for the default of ssh.
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
        """Sends messages and waits for the answers.

        Args:
            messages: the messages, by the index of the connection.
            timeout_s: how long to wait.

        Returns:
            The answers by index, and for each connection without an answer the reason.
        """
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
        # Without a pipe, `select` may return at once, and the loops that call this would keep a core busy until the programs
        # have ended.
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.05))

    def close(self) -> None:
        """Ends all connections."""
        # First all inputs are closed, so that all hosts end at the same time.
        for channel in self.channels:
            channel.close_input()
        for channel in self.channels:
            channel.close()
        self._selector.close()


class RunChannels(Channels):
    """The connections over which all launchers of a job are started. `prepare` comes first, then `wait`.

    Args:
        job: the job, with its assignment.
        names: a name for each connection.
        commands: the command that carries each connection.

    Attributes:
        place: where node 0 listens, from `prepare` on; None where there is only one node.
    """

    def __init__(self, job: Job, names: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
        super().__init__(names, commands, job.reach.port)
        self.job = job
        self.hosts = [slots.host for slots in assignment_of(job).hosts]
        self.place: Place | None = None

    def ask(self, messages: Messages) -> Messages:
        """Sends messages to nodes, and returns their answers; both by the number of the node.

        Raises:
            LaunchError: `launch-hosts`, where some do not answer.
        """
        raise NotImplementedError

    def follow(self) -> int:
        """Starts the run on all nodes, shows their output and waits for their end. Returns the first exit code that is not 0.

        Raises:
            LaunchError: `launch-host-lost`.
        """
        raise NotImplementedError

    def flag_without(self, hosts: Sequence[str]) -> str:
        """Returns the flag that leaves hosts out of the run."""
        return f"--exclude {'@'.join(hosts)}"

    def prepare(self) -> None:
        """Sends the assignment to all nodes, which check it, and finds out where node 0 will listen.

        Raises:
            LaunchError: `launch-hosts`, with the problems of each host. All connections are closed then.
        """
        message = assignment_of(self.job).to_message()
        try:
            ready = self.ask({node: {"orders": message, "node": node} for node in range(len(self.hosts))})
            self.raise_if_any({node: answer["problems"] for node, answer in ready.items()})
            if len(self.hosts) > 1:
                self.place = self._place_of_node_0(ready)
        except BaseException:
            self.close()
            raise

    def wait(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            LaunchError: `launch-host-lost`.
        """
        try:
            return Outcome(self.follow())
        finally:
            self.close()

    def raise_if_any(self, problems: Mapping[int, Sequence[str]]) -> None:
        """Raises one error for all nodes with problems, if there are any.

        Args:
            problems: the problems of some nodes, by the number of the node.
        """
        unfit = []
        lines = []
        for node in sorted(problems):
            if problems[node]:
                unfit.append(self.hosts[node])
                lines += [f"{self.hosts[node]}: {problem}" for problem in problems[node]]
        if unfit:
            raise unfit_hosts_error(len(self.hosts), unfit, lines, self.flag_without(unfit))

    def _place_of_node_0(self, ready: Messages) -> Place:
        """Makes node 0 listen and the others try its addresses. Returns where it listens.

        Args:
            ready: the answers of the nodes to the assignment.
        """
        others = range(1, len(self.hosts))
        # A host may have several networks. Node 0 answers with those of its addresses from which a route leads to the others.
        towards = [ready[node]["address"] for node in others if ready[node]["address"]]
        listens = self.ask({0: {"listen": self.job.main_port, "towards": towards}})[0]
        if listens["problem"]:
            self.raise_if_any({0: [listens["problem"]]})
        port = int(listens["port"])
        # An address that the user has set is the only one that is tried.
        if self.job.main_address:
            candidates = [self.job.main_address]
        else:
            candidates = [*listens["addresses"], self.hosts[0]]
        answers = self.ask({node: {"reach": [candidates, port]} for node in others})
        for address in candidates:
            reached_by_all = all(address in answer["reached"] for answer in answers.values())
            if reached_by_all:
                return address, port
        # No address works for all hosts. The error names the hosts that do not reach the first address.
        problem = f"it does not reach {self.hosts[0]} at {', '.join(candidates)} (port {port})"
        unreached = [node for node, answer in answers.items() if candidates[0] not in answer["reached"]]
        self.raise_if_any({node: [problem] for node in unreached})
        raise AssertionError("an address that all nodes reach was returned above")


class HostChannels(RunChannels):
    """A connection to each host of a job.

    Args:
        job: the job, with its assignment.
        commands: the command that carries the connection to each host.
    """

    def __init__(self, job: Job, commands: Sequence[Sequence[str]]) -> None:
        names = [slots.host for slots in assignment_of(job).hosts]
        super().__init__(job, names, commands)

    def ask(self, messages: Messages) -> Messages:
        """As `RunChannels.ask`."""
        answers, silent = self.exchange(messages, self.job.reach.timeout_s)
        problems = {node: [reason] for node, reason in silent.items()}
        if problems:  # hosts that have answered may have problems too: one error reports them all
            for node, answer in answers.items():
                problems[node] = answer.get("problems", [])
            self.raise_if_any(problems)
        return answers

    def follow(self) -> int:
        """As `RunChannels.follow`."""
        signals = Signals(self._signal)
        signals.enter()
        for channel in self.channels:
            channel.begun = True
            channel.send({"go": self.place})
        codes: dict[str, int] = {}  # by host, in the order in which the hosts ended
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
                        # Where ssh itself has failed, the other launchers may notice it only after a long silence, so they
                        # are asked to end at once.
                        if code != _LOST:
                            end_at += _AFTER_FAILURE_S
                for number in signals.take_new():
                    # The signal asks the hosts to end, and gives them their grace period: no second one may cut it short.
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
            raise LaunchError(
                "launch-host-lost",
                f"the connection to {failed[0]} was lost.",
                why="ssh ended before the host reported how its processes ended; the processes of other hosts were stopped",
                fix="check that the host is up and read its log, then start the run again: the script resumes",
            )
        return codes[failed[0]]

    def _signal(self, number: int) -> None:
        for channel in self.channels:
            if channel.code is None:
                channel.send({"signal": int(number)})


def unfit_hosts_error(total: int, hosts: Sequence[str], lines: Sequence[str], flag: str = "") -> LaunchError:
    """Returns the error for hosts that cannot take part.

    Args:
        total: how many hosts were to take part.
        hosts: the hosts with problems.
        lines: the problems, each with the name of its host.
        flag: the flag that leaves these hosts out; "" for none.
    """
    fix = "correct the problems that are named"
    if flag and len(hosts) < total:
        them = "it" if len(hosts) == 1 else "them"
        fix += f", or exclude {them}: {flag}"
    return LaunchError(
        "launch-hosts",
        f"{len(hosts)} of {total} host{'s' * (total > 1)} cannot take part; nothing was started on any.",
        why=lines,
        fix=fix,
    )
