"""The launchers of an allocation, one on each node, which one srun has started, and which are talked to through it.

srun gives its input to all of them, and shows the output of all; `remote.py` is the other end. So the assignment, with the
secret of the run, stands in no command line, no variable and no file, and signals do not go through srun, which would kill
the processes at SIGTERM and leave them no time to save.

prepare: assignment to all -> who lacks what -> one error for all of them, or where node 0 is reached by the others
follow:  go to all -> their lines on this terminal -> how each has ended; signals are passed on
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.base.errors import LaunchError
from paceline.launch.launcher import Job
from paceline.launch.processes.signals import Signals
from paceline.launch.remote.channels import (
    HostChannel,
    Messages,
    Place,
    place_of_node_0,
    unfit_hosts,
    unfit_hosts_error,
)
from paceline.world.detect.slurm import expand

_HEARTBEAT_S = 5.0
# All launchers end together, when the last process of the last node has: after this time a node that has not said so is lost.
_LAST_WORD_S = 5.0
_SRUN_ENDS_S = 5.0
_OTHERS_TOO_S = 1.0  # where one launcher has failed to start, how long the same on other nodes is waited for
_UNKNOWN = -1  # the node of an answer that does not say which it is
_ENDED_TASK = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.+)")
_NO_PROGRAM = re.compile(r"execve\(\): (\S+): (.+)")


class Step:
    """One srun, with a launcher on each node.

    Args:
        job: the job, with its assignment.
        command: srun and its words, which start `remote.py`.
    """

    def __init__(self, job: Job, command: Sequence[str]) -> None:
        self._job = job
        self._names = [host.host for host in job.assigned.hosts]
        self._channel = HostChannel("srun", command)
        self._ends: dict[int, int] = {}  # exit codes by node, in the order in which the nodes ended
        self._selector = selectors.DefaultSelector()
        for stream, pipe in self._channel.pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def prepare(self) -> Place | None:
        """Gives all nodes their assignment; returns where node 0 will listen, or None where there is no other node.

        Raises:
            LaunchError: `launch-hosts`, with what keeps each node from taking part.
        """
        message = {"orders": self._job.assigned.to_message(), "node": None}
        ready = self._ask(dict.fromkeys(range(len(self._names)), message))
        self._raise_if_any({node: answer["problems"] for node, answer in ready.items()})
        return place_of_node_0(self._job, ready, self._ask, self._raise_if_any)

    def _ask(self, messages: Messages) -> Messages:
        """Asks some nodes, all of them the same; gives what each answers.

        Raises:
            LaunchError: `launch-hosts`, where some do not.
        """
        channel, nodes = self._channel, list(messages)
        message = messages[nodes[0]]
        # The first message goes to launchers that do not know their numbers yet.
        channel.send(message if "orders" in message else {**message, "to": nodes})
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._job.reach.timeout_s
        while len(answers) < len(nodes) and time.monotonic() < deadline:
            self._read(0.2)
            for answer in channel.answers:
                answers[answer.get("node", _UNKNOWN)] = answer
            channel.answers.clear()
            if channel.code is not None or self._ended_tasks():
                break
        if len(answers) < len(nodes) or _UNKNOWN in answers:
            self._raise_unanswered(answers, nodes)
        return answers

    def _raise_unanswered(self, answers: Messages, nodes: Collection[int]) -> None:
        """Raises what kept nodes from answering; those that have answered may lack something too."""
        channel = self._channel
        timed_out = channel.code is None and not self._ended_tasks()
        self._read_until_end(0.0 if timed_out else _OTHERS_TOO_S)
        # The end of the input ends launchers that lack nothing, too: srun's words about those say nothing.
        ended = self._ended_tasks()
        channel.close_input()
        self._read_until_end(_SRUN_ENDS_S)
        problems: dict[int, list[str]] = {node: answers[node].get("problems", []) for node in answers if node >= 0}
        for node in nodes:
            name = self._names[node]
            # Where srun names nodes whose launcher has ended, the others would have answered.
            if node in answers or (ended and name not in ended):
                continue
            if timed_out:
                problems[node] = [f"it did not answer within {self._job.reach.timeout_s:g} s"]
            else:
                problems[node] = [self._why_ended(ended.get(name, ""))]
        if _UNKNOWN in answers:  # an older version does not say which node it is on
            problems.setdefault(min(set(nodes) - set(answers)), []).extend(answers[_UNKNOWN].get("problems", []))
        self._raise_if_any(problems)

    def _read_until_end(self, seconds: float) -> None:
        """Takes in what comes until srun has ended, for so long at most."""
        deadline = time.monotonic() + seconds
        while self._channel.code is None and time.monotonic() < deadline:
            self._read(0.1)

    def _why_ended(self, how: str) -> str:
        """Why a launcher ended before it could answer."""
        no_program = _NO_PROGRAM.search(self._channel.output_before)
        if no_program is not None:
            return f"{no_program[1]} cannot be run there ({no_program[2].lower()})"
        why = self._channel.why_silent(None, sys.executable, 0.0)
        return f"{how.lower()}: {why}" if how and why.startswith("exit code") else why

    def _ended_tasks(self) -> dict[str, str]:
        """Nodes whose launcher has failed, as srun says it."""
        ended = {}
        for names, how in _ENDED_TASK.findall(self._channel.output_before):
            ended.update(dict.fromkeys(expand(names), how))
        return ended

    def _raise_if_any(self, problems: Mapping[int, list[str]]) -> None:
        unfit, lines = unfit_hosts(self._names, problems)
        if unfit:
            leave_out = f"--sbatch-args=--exclude={','.join(unfit)}"
            raise unfit_hosts_error(self._job.assigned, unfit, lines, leave_out)

    def follow(self, place: Place | None) -> int:
        """Has all nodes begin, shows what they write, and waits for their end; returns the first exit code that is not 0.

        Raises:
            LaunchError: `launch-host-lost`, where a node has not said how it ended.
        """
        channel = self._channel
        signals = Signals(self._signal)
        signals.enter()
        channel.begun = True
        channel.send({"go": place})
        last_heartbeat = time.monotonic()
        lost_at = float("inf")
        try:
            while channel.code is None and time.monotonic() < lost_at:
                self._read(0.2)
                for answer in channel.answers:
                    self._ends[answer["node"]] = answer["end"]
                    lost_at = min(lost_at, time.monotonic() + _LAST_WORD_S)
                channel.answers.clear()
                for number in signals.take_new():
                    self._signal(number)
                if len(self._ends) == len(self._names):
                    lost_at = float("inf")
                    channel.close_input()
                elif time.monotonic() - last_heartbeat > _HEARTBEAT_S:
                    last_heartbeat = time.monotonic()
                    channel.send(None)
        finally:
            signals.leave()
        missing = [name for node, name in enumerate(self._names) if node not in self._ends]
        if missing and not signals.ending:
            raise _lost_error(missing)
        for code in self._ends.values():
            if code:
                return code
        return 128 + signals.ending[0] if missing else 0

    def _signal(self, number: int) -> None:
        if len(self._ends) < len(self._names):  # nobody listens any more
            self._channel.send({"signal": int(number)})

    def _read(self, seconds: float) -> None:
        for event, _ in self._selector.select(seconds):
            data = os.read(event.fd, 1 << 16)
            self._channel.receive(event.data, data)
            if not data:
                self._selector.unregister(event.fileobj)
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.05))

    def close(self) -> None:
        """Ends srun, and with it whatever listens to it."""
        self._channel.close()
        self._selector.close()


def _lost_error(names: Sequence[str]) -> LaunchError:
    """The error where nodes were lost on the way."""
    was, it_has, its = "was", "it has", "its"
    if len(names) > 1:
        was, it_has, its = "were", "they have", "their"
    return LaunchError(
        "launch-host-lost",
        f"{', '.join(names)} {was} lost.",
        why=f"{it_has} not said how {its} processes ended; those of the other nodes were ended",
        fix="start again (`--requeue` does so by itself): the script resumes from its last checkpoint",
    )
