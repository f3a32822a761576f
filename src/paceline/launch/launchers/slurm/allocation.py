"""The allocation of SLURM that a process is in, as its environment tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.given import Choice
from paceline.config.sources import Launch
from paceline.launch.job import range_of_nodes
from paceline.world.detect import slurm

# With one of these the user says by himself which launchers there are and how they find each other.
_BY_HAND = ("hostfile", "node_rank", "main_address")


@dataclass(frozen=True)
class Allocation:
    """Nodes that SLURM has given to a job.

    Attributes:
        job: the job's number as `scontrol` takes it; of an element of a job array, "ARRAY_ELEMENT".
        nodes: their names, in SLURM's order.
        procs: processes that the job asked for on each node, by GPUs or by tasks; 0 where it did not say.
        restarts: how often the job went back to the queue.
        in_step: whether a step is running here already (`srun --pty bash`), whose resources another one has to share.
        on_node: whether this process runs on one of the nodes, and not on the host where `salloc` was typed.
    """

    job: str
    nodes: tuple[str, ...]
    procs: int = 0
    restarts: int = 0
    in_step: bool = False
    on_node: bool = True


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """The allocation, in a batch script or a shell; None outside of one, and in a task of srun or another launcher."""
    nodes = tuple(slurm.expand(env.get("SLURM_JOB_NODELIST", "")))
    if not env.get("SLURM_JOB_ID") or not nodes or "RANK" in env or slurm.is_task(env):
        return None
    element = env.get("SLURM_ARRAY_TASK_ID")
    # The last element of an array has the number of the whole array, so that its own number alone would mean all of it.
    job = f"{env['SLURM_ARRAY_JOB_ID']}_{element}" if element else env["SLURM_JOB_ID"]
    return Allocation(
        job, nodes,
        procs=_number(env, "SLURM_GPUS_ON_NODE") or _number(env, "SLURM_NTASKS_PER_NODE"),
        restarts=_number(env, "SLURM_RESTART_COUNT"),
        in_step="SLURM_PTY_PORT" in env,
        on_node="SLURMD_NODENAME" in env,
    )  # fmt: skip


def completed(settings: Launch, env: Mapping[str, str]) -> Launch:
    """The settings of a launch within an allocation: SLURM's launcher, and what the job says about nodes and processes.

    Outside of an allocation, or where something else was said, they stay as they are. So they do on the only node of a job,
    where nobody has to be started elsewhere.
    """
    launch, allocation = settings.launch, allocation_of(env)
    given = settings.given
    if allocation is None or not given.keys().isdisjoint(_BY_HAND):
        return settings
    if "launcher" in given and launch.launcher != "slurm":
        return settings
    count = len(allocation.nodes)
    least, most = range_of_nodes(launch.nodes if "nodes" in given else count)
    if "launcher" not in given and most == 1 and allocation.on_node:
        return settings
    values: dict[str, Any] = {"launcher": "slurm", "nodes": most}
    if least < most:
        # SLURM may have given fewer nodes than the most that would be of use.
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
