"""Reads the SLURM allocation of this process from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.given import Choice
from paceline.config.kinds import least_and_most
from paceline.config.sources import Launch
from paceline.world.detect import slurm

# With one of these settings the user decides which launchers there are, and how they find each other.
_BY_HAND = ("hostfile", "node_rank", "main_address")


@dataclass(frozen=True)
class SlurmAllocation:
    """Nodes that SLURM has given to a job.

    Attributes:
        job: the job's number as `scontrol` takes it; of an element of a job array, "ARRAY_ELEMENT".
        nodes: their names, in SLURM's order.
        procs: processes that the job requested on each node, by GPUs or by tasks; 0 if it did not.
        restarts: how often the job went back to the queue.
        in_step: whether this process is in a step already (`srun --pty bash`), with which another step must share resources.
        on_node: whether this process runs on one of the nodes, and not on the host where `salloc` was typed.
    """

    job: str
    nodes: tuple[str, ...]
    procs: int = 0
    restarts: int = 0
    in_step: bool = False
    on_node: bool = True


def allocation_of(env: Mapping[str, str]) -> SlurmAllocation | None:
    """Returns the allocation of a batch script or a shell.

    Returns None outside of an allocation, and in a task that srun or another launcher has started.
    """
    nodes = tuple(slurm.expand(env.get("SLURM_JOB_NODELIST", "")))
    if not env.get("SLURM_JOB_ID") or not nodes or "RANK" in env or slurm.is_task(env):
        return None
    element = env.get("SLURM_ARRAY_TASK_ID")
    # One element of an array has the same job number as the whole array, so that number alone would mean all elements.
    job = f"{env['SLURM_ARRAY_JOB_ID']}_{element}" if element else env["SLURM_JOB_ID"]
    return SlurmAllocation(
        job, nodes,
        procs=_number(env, "SLURM_GPUS_ON_NODE") or _number(env, "SLURM_NTASKS_PER_NODE"),
        restarts=_number(env, "SLURM_RESTART_COUNT"),
        in_step="SLURM_PTY_PORT" in env,
        on_node="SLURMD_NODENAME" in env,
    )  # fmt: skip


def completed(settings: Launch, env: Mapping[str, str]) -> Launch:
    """Completes the settings of a launch within an allocation: SLURM's launcher, and the job's nodes and processes.

    The settings stay unchanged outside of an allocation, if the user has set something else, and on the only node of a job,
    where no launcher has to be started elsewhere.
    """
    launch = settings.launch
    allocation = allocation_of(env)
    given = settings.given
    if allocation is None or not given.keys().isdisjoint(_BY_HAND):
        return settings
    if "launcher" in given and launch.launcher != "slurm":
        return settings
    count = len(allocation.nodes)
    least, most = least_and_most(launch.nodes if "nodes" in given else count)
    if "launcher" not in given and most == 1 and allocation.on_node:
        return settings
    values: dict[str, Any] = {"launcher": "slurm", "nodes": most}
    if least < most:
        # For a range of nodes SLURM may have given fewer than the most.
        most = min(most, count)
        values["nodes"] = f"{least}:{most}" if least < most else most
    if launch.procs == "auto" and not launch.gpus_per_node and allocation.procs:
        values["procs"] = allocation.procs
    decisions = []
    for row in settings.decisions:
        is_new = row.field in values and values[row.field] != row.value
        decisions.append(Choice(row.field, values[row.field], "environment", "SLURM_JOB_ID") if is_new else row)
    times = f" (restart {allocation.restarts})" if allocation.restarts else ""
    notice = f"job {allocation.job} of SLURM, on {', '.join(allocation.nodes)}{times}: one launcher on each node."
    return replace(
        settings, launch=replace(launch, **values), decisions=tuple(decisions), notices=(*settings.notices, notice)
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0
