"""Hosts started by Open MPI's mpirun: one process each, which is that host's launcher."""

from __future__ import annotations

import shutil

from paceline.launch.launcher import Hosts, Job, Rendered
from paceline.launch.launchers.batch import PYTHON, BatchHandle, check
from paceline.launch.remote.assignment import VARIABLE


class OpenMpiLauncher:
    """Starts a job on other hosts with mpirun."""

    name = "openmpi"
    hosts: Hosts = "named"

    def available(self) -> str:
        """What is missing on this host."""
        return "" if shutil.which("mpirun") else "there is no mpirun on this host (openmpi-bin)"

    def render(self, job: Job) -> Rendered:
        """What checks the hosts, and what starts them."""
        hosts = job.assigned.hosts
        # Each launcher divides its host's cores itself, and gives its processes time to save.
        place = ("--host", ",".join(f"{at.host}:1" for at in hosts), "--map-by", "ppr:1:node", "--bind-to", "none")
        patience = ("--mca", "odls_base_sigkill_timeout", str(int(job.grace_s)))
        words = ("mpirun", "-np", str(len(hosts)), *place, *patience, "-x", VARIABLE)
        path = ("-x", "PYTHONPATH") if "PYTHONPATH" in job.assigned.env else ()
        ssh = ("--mca", "plm_rsh_args", f"-p {job.reach.port}") if job.reach.port else ()
        words = (*words, *path, *ssh, *job.reach.args, *PYTHON)
        return Rendered(job, job.target.command, steps=((*words, "survey"), (*words, "run")))

    def submit(self, rendered: Rendered) -> BatchHandle:
        """Has each host look at what it would run.

        Raises:
            LaunchError: `launch-hosts`.
        """
        first, then = rendered.steps
        return BatchHandle(rendered.job, then, check(rendered.job, first))


LAUNCHER = OpenMpiLauncher()
