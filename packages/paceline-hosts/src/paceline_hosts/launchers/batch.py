"""The common part of launchers that start all hosts with one program (mpirun).

mpirun runs `paceline_hosts.remote` on each host: first to check what is missing there, then to run the assignment.
The assignment travels in a variable, so that no part of it appears on a command line. A launcher that starts each host
separately uses `environment_with`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.launch.job import Job
from paceline.launch.launcher import Outcome
from paceline.launch.processes.signals import Signals, kill_with_parent
from paceline_hosts.assignment import VARIABLE, assignment_of
from paceline_hosts.remote.agent import MARK
from paceline_hosts.remote.channels import unfit_hosts_error

PORT = 29500
PYTHON = (sys.executable, "-u", "-m", "paceline_hosts.remote")


@dataclass(frozen=True)
class BatchHandle:
    """A job that one program starts on all hosts.

    Attributes:
        command: the command line of the program.
        env: its environment, which may hold the assignment with its secrets.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(repr=False)

    def wait(self) -> Outcome:
        """Runs the program to its end, and passes signals on to it. If this process dies, the kernel ends the program too.

        Raises:
            LaunchError: `launch-launcher`, where the program cannot be run.
        """
        program: subprocess.Popen[bytes] | None = None

        def pass_on(number: int) -> None:
            if program is not None and program.poll() is None:
                program.send_signal(number)

        signals = Signals(pass_on)
        signals.enter()
        try:
            program = subprocess.Popen(
                list(self.command), env=dict(self.env), stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=partial(kill_with_parent, os.getpid(), signal.SIGTERM),
            )  # fmt: skip
            while True:
                try:
                    code = program.wait(0.2)
                    return Outcome(code if code >= 0 else 128 - code)  # a signal has ended it; counted as a shell does
                except subprocess.TimeoutExpired:
                    for number in signals.take_new():
                        pass_on(number)
        except OSError as error:
            fix = "install it, or choose another with --on"
            raise LaunchError("launch-launcher", f"{self.command[0]} cannot be run.", str(error), fix) from None
        finally:
            signals.leave()


def environment_with(job: Job, place: tuple[str, int] | None, node: int | None = None) -> dict[str, str]:
    """Returns the environment of a program that starts `paceline_hosts.remote`, with the assignment in a variable.

    Args:
        job: the job, with its assignment.
        place: the address and port where node 0 listens; None if it is the only node.
        node: the number of the host that the program starts; None if it starts and numbers all hosts, as mpirun and srun do.
    """
    assignment = json.dumps({"orders": assignment_of(job).to_message(), "place": place, "node": node}, default=str)
    return {**environment.snapshot(), VARIABLE: assignment}


def check(job: Job, command: Sequence[str]) -> tuple[str, int] | None:
    """Checks the job on each host. Returns where node 0 will listen, or None if there is only one host.

    Args:
        job: the job, with its assignment.
        command: starts `paceline_hosts.remote survey` on each host.

    Raises:
        LaunchError: `launch-hosts`, with the problems of each host.
    """
    assignment = assignment_of(job)
    answers: dict[int, dict[str, Any]] = {}
    why = ""
    try:
        done = subprocess.run(
            list(command), env=environment_with(job, None), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=job.reach.timeout_s, check=False,
        )  # fmt: skip
        why = f"{command[0]} ended with {done.returncode}: {' '.join(done.stderr.split()[:60])}"
        for line in done.stdout.splitlines():
            # The program, or the host's shell, may print other lines, or put a prefix before this one.
            if MARK in line:
                answer = json.loads(line.partition(MARK)[2])
                answers[answer["node"]] = answer
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not end within {job.reach.timeout_s:g} s"
    names = [slots.host for slots in assignment.hosts]
    lines = []
    for node, answer in answers.items():
        lines += [f"{names[node]}: {problem}" for problem in answer["problems"]]
    missing = [name for node, name in enumerate(names) if node not in answers]
    if missing:
        lines.append(f"{', '.join(missing)}: no answer; {why}")
    if lines:
        unfit = [name for node, name in enumerate(names) if node not in answers or answers[node]["problems"]]
        raise unfit_hosts_error(len(names), unfit, lines, f"--exclude {'@'.join(unfit)}")
    if len(assignment.hosts) == 1:
        return None
    address = job.main_address or next(iter(answers[0]["addresses"]), assignment.hosts[0].host)
    return address, job.main_port or PORT
