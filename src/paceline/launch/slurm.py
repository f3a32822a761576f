"""Hosts started by SLURM's srun: one task each, which is that host's launcher."""

from __future__ import annotations

import shutil

from paceline.launch.batch import PYTHON, BatchHandle, check
from paceline.launch.launcher import Hosts, Job, Rendered


class SlurmLauncher:
    """Starts a job on other hosts with srun, inside an allocation or with one of its own."""

    name = "slurm"
    hosts: Hosts = "named"

    def available(self) -> str:
        """What is missing on this host."""
        return "" if shutil.which("srun") else "there is no srun on this host"

    def render(self, job: Job) -> Rendered:
        """What checks the hosts, and what starts them."""
        hosts = job.assigned.hosts
        number = str(len(hosts))
        place = (
            "--nodes",
            number,
            "--ntasks",
            number,
            "--ntasks-per-node",
            "1",
            "-w",
            ",".join(at.host for at in hosts),
        )
        manners = ("--cpu-bind=none", "--export=ALL", "--input=none", "--kill-on-bad-exit=1")
        words = ("srun", *place, *manners, *job.reach.args, *PYTHON)
        return Rendered(job, job.target.command, steps=((*words, "survey"), (*words, "run")))

    def submit(self, rendered: Rendered) -> BatchHandle:
        """Has each host look at what it would run.

        Raises:
            LaunchError: `launch-hosts`.
        """
        first, then = rendered.steps
        return BatchHandle(rendered.job, then, check(rendered.job, first))


LAUNCHER = SlurmLauncher()
