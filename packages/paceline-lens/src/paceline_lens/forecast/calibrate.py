"""`calibrate`: starts as many ranks as a run would have, lets them measure, and keeps what they found.

The ranks are started as those of a trial of `paceline tune`: by the local launcher, with the threads and the device that
the run's processes would have. Links between hosts are not measured.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.base.errors import PlanError
from paceline.config.sources import Launch
from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline.launch.make_job import job_of
from paceline_lens.forecast.calibration import Calibration, Machine
from paceline_lens.forecast.device import Device
from paceline_lens.forecast.rehearsal import with_devices
from paceline_lens.forecast.this_host import of_this_host
from paceline_lens.own_runs import run_here

_ROUNDS = 7


@dataclass(frozen=True)
class ThisMachine:
    """This machine, as a run would use it.

    Attributes:
        machine: identifies its calibration.
        job: starts its ranks.
        device: the device of one rank.
        cpu: whether ranks compute on the CPU even where there is an accelerator.
    """

    machine: Machine
    job: Job
    device: Device
    cpu: bool


def this_machine(settings: Launch, env: Mapping[str, str]) -> ThisMachine:
    """Returns this machine, with the ranks and threads that the settings give.

    Raises:
        LaunchError: `tune-device`, where its devices cannot be looked at; ConfigError: those of `job_of`.
    """
    job, device = with_devices(partial(_look, settings, env))
    return ThisMachine(machine_of(job, device.name, env), job, device, settings.run.cpu)


def machine_of(job: Job, device: str, env: Mapping[str, str]) -> Machine:
    """Returns what identifies a calibration for the ranks of a job.

    Args:
        job: starts the ranks.
        device: the device on which they compute, such as "cpu".
        env: the environment of the launcher.
    """
    threads = job.env.get("OMP_NUM_THREADS") or env.get("OMP_NUM_THREADS") or "1"
    # OpenMP takes one number for each nested level.
    outermost = int(threads.split(",")[0])
    return Machine(socket.gethostname(), device, _torch_release(), job.procs, outermost)


def _look(settings: Launch, env: Mapping[str, str]) -> tuple[Job, Device]:
    """Returns the job, and the device of its processes."""
    job, _ = job_of(settings, "calibration", (), env)
    return job, of_this_host(job.procs, cpu=settings.run.cpu)


def _torch_release() -> str:

    return str(torch.__version__)


def calibrate(this: ThisMachine) -> Calibration:
    """Measures this machine with the ranks that a run would have.

    Raises:
        PlanError: `calibration-failed`, where a rank did not come to the end.
    """
    measure = partial(_measure, this.machine, this.cpu, _ROUNDS)
    target = Target("function", "the calibration", (), measure)
    # A calibration is no run: nothing of it is recorded, restarted, or written to the log of one.
    job = replace(
        this.job, target=target, nodes=1, max_restarts=0, log_dir=None, tee=None, ranks=None, watch="", compat=""
    )
    outcome = run_here(job)
    if isinstance(outcome.value, Calibration):
        return outcome.value
    why = ["its ranks were asked to end"]
    if outcome.failure is not None:
        last_line = outcome.failure.report.strip().splitlines()[-1:]
        why = [problem_of(outcome, job).what, *last_line]
    raise PlanError(
        "calibration-failed",
        f"the machine could not be measured with {job.procs} processes.",
        why=why,
        fix="measure on the CPU with one process, to see whether that works: `paceline plan --measure --cpu --procs 1`",
    )


def _measure(machine: Machine, cpu: bool, rounds: int) -> Calibration:
    """Measures on one rank, together with the others. Ranks: all."""
    import torch.distributed as dist

    from paceline.world import rendezvous
    from paceline.world.world import World
    from paceline_lens.forecast.measure import Probes

    world = rendezvous.join(World.detect(), cpu=cpu)
    group: Any = dist.group.WORLD if world.size > 1 else None
    probes = Probes(torch.device(world.device), group)
    measurements = [probes.round() for _ in range(rounds)]
    calibration = probes.calibration(measurements, machine, time.time())
    rendezvous.leave()
    return calibration
