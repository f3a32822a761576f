"""Starts hosts with Open MPI's mpirun. It starts one process on each host, the launcher of that host."""

from __future__ import annotations

import shutil

from paceline.launch.job import Job
from paceline.launch.launcher import Hosts, Rendered
from paceline_hosts.assignment import VARIABLE, assignment_of
from paceline_hosts.launchers.batch import PYTHON, BatchHandle, check, environment_with


class OpenMpiLauncher:
    """Starts a job on other hosts with mpirun."""

    name = "openmpi"
    hosts: Hosts = "named"

    def available(self) -> str:
        """Returns what is missing on this host; "" if nothing is."""
        return "" if shutil.which("mpirun") else "there is no mpirun on this host (openmpi-bin)"

    def render(self, job: Job) -> Rendered:
        """Returns the command that checks the hosts, and the command that starts them."""
        hosts = assignment_of(job).hosts
        # mpirun must not bind a launcher to a core, because the launcher divides the cores of its host itself. Nor may mpirun
        # kill it soon after a signal, because its processes get time to save.
        place = ("--host", ",".join(f"{at.host}:1" for at in hosts), "--map-by", "ppr:1:node", "--bind-to", "none")
        patience = ("--mca", "odls_base_sigkill_timeout", str(int(job.grace_s)))
        words = ("mpirun", "-np", str(len(hosts)), *place, *patience, "-x", VARIABLE)
        path = ("-x", "PYTHONPATH") if "PYTHONPATH" in assignment_of(job).env else ()
        ssh = ("--mca", "plm_rsh_args", f"-p {job.reach.port}") if job.reach.port else ()
        words = (*words, *path, *ssh, *job.reach.args, *PYTHON)
        return Rendered(job, job.target.command, steps=((*words, "survey"), (*words, "run")))

    def submit(self, rendered: Rendered) -> BatchHandle:
        """Lets each host check what it would run.

        Raises:
            LaunchError: `launch-hosts`.
        """
        survey, run = rendered.steps
        place = check(rendered.job, survey)
        return BatchHandle(run, environment_with(rendered.job, place))


LAUNCHER = OpenMpiLauncher()
