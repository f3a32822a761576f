"""The launchers of a SLURM allocation, one on each node. One srun starts them all and carries the messages to them.

srun copies its input to all launchers, and their output to its own; `remote/agent.py` is the other end. So the assignment, with
the secret of the run, appears in no command line, variable or file. Signals travel as messages too, because srun itself
would kill the processes at SIGTERM and leave them no time to save.

prepare: send the assignment -> each node reports what is missing -> one error for all, or the address of node 0
follow:  tell all nodes to start -> show their output -> collect their exit codes; pass signals on
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from paceline.base.errors import LaunchError
from paceline.launch.job import Job
from paceline.launch.processes.signals import Signals
from paceline.world.detect.slurm import expand
from paceline_hosts.remote.channels import Messages, RunChannels

_HEARTBEAT_S = 5.0
# All launchers end together. A node that has not reported its end this long after the first one counts as lost.
_END_TIMEOUT_S = 5.0
_SRUN_EXIT_TIMEOUT_S = 5.0
# After one launcher has failed to start, how long to wait for the same failure on other nodes.
_MORE_FAILURES_S = 1.0
_ENDED_TASK = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.+)")
_NO_PROGRAM = re.compile(r"execve\(\): (\S+): (.+)")


class SrunStep(RunChannels):
    """One srun, which runs a launcher on each node.

    Args:
        job: the job, with its assignment.
        command: the srun command, which starts `paceline_hosts.remote` on each node.
    """

    def __init__(self, job: Job, command: Sequence[str]) -> None:
        super().__init__(job, ["srun"], [command])
        (self._channel,) = self.channels
        self._ends: dict[int, int] = {}  # exit codes by node, in the order in which the nodes ended

    def flag_without(self, hosts: Sequence[str]) -> str:
        """As `RunChannels.flag_without`, for a job that SLURM has to place on other nodes."""
        return f"--sbatch-args=--exclude={','.join(hosts)}"

    def ask(self, messages: Messages) -> Messages:
        """As `RunChannels.ask`; the messages are the same but for the number of the node."""
        channel = self._channel
        nodes = list(messages)
        message = messages[nodes[0]]
        # All launchers read the same input. At the first message none of them knows the number of its node yet.
        channel.send({**message, "node": None} if "orders" in message else {**message, "to": nodes})
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.job.reach.timeout_s
        while len(answers) < len(nodes) and time.monotonic() < deadline:
            self._read(0.2)
            for answer in channel.answers:
                answers[answer["node"]] = answer
            channel.answers.clear()
            if channel.code is not None or self._ended_tasks():
                break
        if len(answers) < len(nodes):
            self._raise_unanswered(answers, nodes)
        return answers

    def _raise_unanswered(self, answers: Messages, nodes: Collection[int]) -> None:
        """Raises an error that says why nodes did not answer, and what is missing on those that did."""
        channel = self._channel
        timed_out = channel.code is None and not self._ended_tasks()
        self._read_until_end(0.0 if timed_out else _MORE_FAILURES_S)
        # Closing the input ends the launchers that have no problem too; what srun then reports about those means nothing.
        ended = self._ended_tasks()
        channel.close_input()
        self._read_until_end(_SRUN_EXIT_TIMEOUT_S)
        problems: dict[int, list[str]] = {node: answers[node].get("problems", []) for node in answers}
        for node in nodes:
            name = self.hosts[node]
            # If srun names nodes whose launcher has ended, the launchers of other nodes are fine.
            if node in answers or (ended and name not in ended):
                continue
            if timed_out:
                problems[node] = [f"it did not answer within {self.job.reach.timeout_s:g} s"]
            else:
                problems[node] = [self._why_ended(ended.get(name, ""))]
        self.raise_if_any(problems)

    def _read_until_end(self, seconds: float) -> None:
        """Reads output until srun has ended, for some seconds at most."""
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
        """Returns the nodes whose launcher has failed, with what srun reports about each."""
        ended = {}
        for names, how in _ENDED_TASK.findall(self._channel.output_before):
            ended.update(dict.fromkeys(expand(names), how))
        return ended

    def follow(self) -> int:
        """As `RunChannels.follow`."""
        channel = self._channel
        signals = Signals(self._signal)
        signals.enter()
        channel.begun = True
        channel.send({"go": self.place})
        last_heartbeat = time.monotonic()
        lost_at = float("inf")
        try:
            while channel.code is None and time.monotonic() < lost_at:
                self._read(0.2)
                for answer in channel.answers:
                    self._ends[answer["node"]] = answer["end"]
                    lost_at = min(lost_at, time.monotonic() + _END_TIMEOUT_S)
                channel.answers.clear()
                for number in signals.take_new():
                    self._signal(number)
                if len(self._ends) == len(self.hosts):
                    lost_at = float("inf")
                    channel.close_input()
                elif time.monotonic() - last_heartbeat > _HEARTBEAT_S:
                    last_heartbeat = time.monotonic()
                    channel.send(None)
        finally:
            signals.leave()
        missing = [name for node, name in enumerate(self.hosts) if node not in self._ends]
        if missing and not signals.ending:
            raise _lost_error(missing)
        for code in self._ends.values():
            if code:
                return code
        return 128 + signals.ending[0] if missing else 0

    def _signal(self, number: int) -> None:
        if len(self._ends) < len(self.hosts):  # after that the input of srun is closed
            self._channel.send({"signal": int(number)})


def _lost_error(names: Sequence[str]) -> LaunchError:
    """Returns the error where nodes were lost on the way."""
    count = f"node{'s' * (len(names) > 1)}"
    return LaunchError(
        "launch-host-lost",
        f"the connection to the {count} {', '.join(names)} was lost.",
        why=f"the launcher of the {count} did not report how its processes ended; the processes of other nodes were stopped",
        fix="start the run again (`--requeue` does it automatically): the script resumes from its last checkpoint",
    )
