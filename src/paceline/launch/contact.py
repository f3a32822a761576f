"""The starter's end of the conversations with `remote.py`: one connection to each host, all asked at the same time.

meet:    orders to all -> who lacks what -> one error for all of them, or where node 0 is reached by the others
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.base.errors import LaunchError
from paceline.launch.launcher import Job
from paceline.launch.orders import Orders
from paceline.launch.output import show
from paceline.launch.remote import MARK
from paceline.launch.signals import Signals

_BEAT_S = 5.0
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
    ("No module named 'paceline", "paceline is not installed for {python} there"),
    ("Connection timed out", "it cannot be reached{port}: no answer"),
    ("No route to host", "it cannot be reached{port}: no route to it"),
    ("Network is unreachable", "it cannot be reached{port}: no network leads there"),
)  # fmt: skip


class Contact:
    """A connection to one host.

    Attributes:
        host: its name.
        answers: what it has answered and nobody has read yet.
        told: what it, or ssh, has said besides before the run began.
        code: exit code of the program that carries the connection; None while it runs.
    """

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self.host = host
        self.answers: list[dict[str, Any]] = []
        self.told = ""
        self.begun = False
        # In a session of its own: Ctrl-C is for us to pass on. If we die, it reads the end of its input.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.parts = {1: b"", 2: b""}
        self.open = 2

    @property
    def code(self) -> int | None:
        """How the connection ended."""
        return self.process.poll() if self.open == 0 else None

    def say(self, message: dict[str, Any] | None) -> None:
        """Sends a message; None is a sign of life."""
        assert self.process.stdin is not None, "it was opened with one"
        with suppress(BrokenPipeError):  # how it ended is seen by reading
            self.process.stdin.write(b"\n" if message is None else json.dumps(message, default=str).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, stream: int, data: bytes) -> None:
        """Takes in what has come: answers, and lines for the terminal."""
        *lines, self.parts[stream] = (self.parts[stream] + data).split(b"\n")
        if not data and self.parts[stream]:
            lines.append(self.parts[stream])
        for line in lines:
            text = line.decode(errors="replace")
            if stream == 1 and text.startswith(MARK):
                self.answers.append(json.loads(text.removeprefix(MARK)))
            elif self.begun:
                show(sys.stdout if stream == 1 else sys.stderr, line + b"\n")
            else:
                self.told += text + "\n"

    def why(self, port: int | None, python: str, patience_s: float) -> str:
        """Why it has not answered."""
        if self.code is None:
            return f"it did not answer within {patience_s:g} s"
        for said, meaning in _REASONS:
            if said in self.told:
                return meaning.format(host=self.host, port=f" at port {port}" if port else "", python=python)
        if self.code == 127:
            return f"there is no {python} there"
        return f"exit code {self.code}: {' '.join(self.told.split()[-40:]) or 'nothing was said'}"

    def close(self) -> None:
        """Ends the connection, and with it whatever listens to it there."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for each in (self.process.stdout, self.process.stderr):
            each.close()  # type: ignore[union-attr]


class Contacts:
    """The connections to all hosts of a job.

    Args:
        job: the job, with its orders.
        commands: what carries each connection, by host.
    """

    def __init__(self, job: Job, commands: Sequence[Sequence[str]]) -> None:
        assert job.orders is not None, "a job of other hosts has orders"
        self.job, self.orders = job, job.orders
        self._selector = selectors.DefaultSelector()
        self.all = [Contact(at.host, command) for at, command in zip(self.orders.hosts, commands, strict=True)]
        for each in self.all:
            for stream, pipe in ((1, each.process.stdout), (2, each.process.stderr)):
                os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
                self._selector.register(pipe, selectors.EVENT_READ, (each, stream))  # type: ignore[arg-type]

    def meet(self) -> Place | None:
        """Gives all hosts their orders; returns where node 0 will listen, or None where there is no other host.

        Raises:
            LaunchError: `launch-hosts`, with what keeps each host from taking part.
        """
        first = {number: {"orders": self.orders.message(), "node": number} for number in range(len(self.orders.hosts))}
        ready = self.ask(first)
        self._fail({number: list(ready[number]["problems"]) for number in ready})
        if len(self.all) == 1:
            return None
        told, towards = self.job.main_address, [each["address"] for each in ready.values() if each["address"]]
        listens = self.ask({0: {"listen": self.job.main_port, "towards": towards[1:]}})[0]
        self._fail({0: [listens["problem"]] if listens["problem"] else []})
        candidates = [told] if told else [*listens["addresses"], self.orders.hosts[0].host]
        reach = {number: {"reach": [candidates, listens["port"]]} for number in range(1, len(self.all))}
        reached = {number: answer["reached"] for number, answer in self.ask(reach).items()}
        for address in candidates:
            if all(address in each for each in reached.values()):
                return address, int(listens["port"])
        at = f"{', '.join(candidates)} (port {listens['port']})"
        self._fail(
            {
                number: [f"it does not reach {self.all[0].host} at {at}"]
                for number, each in reached.items()
                if candidates[0] not in each
            }
        )
        raise AssertionError("an address that nobody misses is one that all reach")

    def ask(self, messages: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Sends messages to hosts, and gives what each answers.

        Raises:
            LaunchError: `launch-hosts`, where some do not.
        """
        for number, message in messages.items():
            self.all[number].say(message)
        patience_s = self.job.reach.timeout_s
        deadline = time.monotonic() + patience_s
        waited = [self.all[number] for number in messages]
        while time.monotonic() < deadline and any(not each.answers and each.code is None for each in waited):
            self._read(0.2)
        silent = [number for number in messages if not self.all[number].answers]
        wrong = {number: [self.all[number].why(self.job.reach.port, sys.executable, patience_s)] for number in silent}
        answers = {number: self.all[number].answers.pop(0) for number in messages if number not in silent}
        wrong |= {number: found for number, answer in answers.items() if silent and (found := answer.get("problems"))}
        self._fail(wrong)
        return answers

    def _fail(self, wrong: Mapping[int, list[str]]) -> None:
        """Raises one error for all hosts that cannot take part, if any."""
        lines = [f"{self.all[number].host}: {each}" for number in sorted(wrong) for each in wrong[number]]
        if lines:
            hosts = [self.all[number].host for number in sorted(wrong) if wrong[number]]
            raise unfit(self.orders, hosts, lines)

    def _read(self, seconds: float) -> None:
        for event, _ in self._selector.select(seconds):
            contact, stream = event.data
            data = os.read(event.fd, 1 << 16)
            contact.hear(stream, data)
            if not data:
                self._selector.unregister(event.fileobj)
                contact.open -= 1
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.05))

    def follow(self, place: Place | None) -> int:
        """Has all hosts begin, shows what they write, and waits for their end; returns the first exit code that is not 0.

        Raises:
            LaunchError: `launch-host-lost`, where a connection ends before its host has.
        """
        signals = Signals(lambda number: self._signal(number))
        signals.enter()
        for each in self.all:
            each.begun = True
            each.say({"go": place})
        ended: dict[str, int] = {}
        passed, beat, end_at = 0, time.monotonic(), float("inf")
        try:
            while len(ended) < len(self.all):
                self._read(0.2)
                for each in self.all:
                    if each.host not in ended and (code := each.code) is not None:
                        ended[each.host] = code
                        if code and end_at == float("inf"):
                            end_at = time.monotonic() + _AFTER_FAILURE_S * (code != _LOST)
                for number in signals.ending[passed:]:
                    passed, end_at = passed + 1, float("inf")
                    self._signal(number)
                now = time.monotonic()
                if now >= end_at:
                    end_at = float("inf")
                    self._signal(signal.SIGTERM)
                if now - beat > _BEAT_S:
                    beat = now
                    for each in self.all:
                        each.say(None)
        finally:
            signals.leave()
        code = next((code for code in ended.values() if code), 0)
        if code == _LOST:
            raise lost(next(host for host, code in ended.items() if code == _LOST))
        return code

    def _signal(self, number: int) -> None:
        for each in self.all:
            if each.code is None:
                each.say({"signal": int(number)})

    def close(self) -> None:
        """Ends all connections."""
        for each in self.all:  # at the same time, and then waits for each
            with suppress(BrokenPipeError):
                each.process.stdin.close()  # type: ignore[union-attr]
        for each in self.all:
            each.close()
        self._selector.close()


def unfit(orders: Orders, hosts: Sequence[str], lines: Sequence[str]) -> LaunchError:
    """The error where hosts cannot take part.

    Args:
        orders: what they were to run.
        hosts: who cannot.
        lines: why, each with the name of its host.
    """
    total = len(orders.hosts)
    left = f", or leave {'it' if len(hosts) == 1 else 'them'} out: --exclude {'@'.join(hosts)}"
    return LaunchError(
        "launch-hosts",
        f"{len(hosts)} of {total} host{'s' * (total > 1)} cannot take part; nothing was started on any.",
        why=lines,
        fix=f"mend what is named{left if len(hosts) < total else ''}",
    )


def lost(host: str) -> LaunchError:
    """The error where a host was lost on the way."""
    return LaunchError(
        "launch-host-lost",
        f"the connection to {host} was lost.",
        why="ssh has ended, and the host has not said how its processes did; those of the others were ended",
        fix="see whether the host is up and what its own log says, then start again: the script resumes",
    )
