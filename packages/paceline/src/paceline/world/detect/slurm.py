"""Reads the variables of `srun`; the launcher for SLURM also uses the functions that read SLURM's lists of hosts.

Only a task that srun started is one of N processes. The batch script of `sbatch`, the shell of `salloc` and
`srun --pty bash` have the same variables of the job, but each of them is a single process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from paceline.world.detect.reading import EnvironmentNumbers, first_port
from paceline.world.world import World

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # the numbers from here on are batch, extern and interactive steps
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")


def detect(env: Mapping[str, str]) -> World | None:
    """Returns the world that the variables of srun describe; None if this process is no task of srun.

    Rank 0 is on the first host of the step, and listens at a port that follows from the job's number. MASTER_ADDR and
    MASTER_PORT override both.

    Raises:
        WorldError: `world-env`, with each variable that is missing or contradicts another.
    """
    if not is_task(env):
        return None
    step = env["SLURM_STEP_ID"]
    reading = EnvironmentNumbers(env, "srun (SLURM_*)")
    rank = reading.number("SLURM_PROCID")
    size = reading.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = reading.number("SLURM_LOCALID")
    node = reading.number("SLURM_NODEID")
    for name, value in (("SLURM_NTASKS", size), ("SLURM_LOCALID", local_rank), ("SLURM_NODEID", node)):
        if value is None and not reading.problems:
            reading.add_problem(f"{name} is not set, but {reading.describe(*_NAMES)}.", "start the tasks with srun")
    if rank is None or size is None or local_rank is None or node is None:
        reading.fail()
    nodes = reading.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    job = reading.number("SLURM_JOB_ID", "SLURM_JOBID") or 0
    port = reading.number("MASTER_PORT") or first_port(job * 16 + int(step) % 16)
    address = env.get("MASTER_ADDR") or _first_host(reading, env, nodes)
    local_size = _tasks_here(env, node, nodes, size)
    return reading.checked(
        World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            nodes=nodes,
            source="slurm",
            address=address,
            port=port,
        )
    )


def is_task(env: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as one of its tasks. A shell (`srun --pty`) or a batch script is none."""
    step = env.get("SLURM_STEP_ID", "")
    is_step_of_tasks = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return "SLURM_PROCID" in env and is_step_of_tasks and "SLURM_PTY_PORT" not in env


def _first_host(reading: EnvironmentNumbers, env: Mapping[str, str], nodes: int) -> str | None:
    if nodes == 1:
        return "127.0.0.1"  # on some clusters the name of a node cannot be resolved on that node
    hosts = next((env[name] for name in _HOSTS if name in env), "")
    names = expand(hosts)
    if not names:
        reading.add_problem(f"no host can be read from the node list {hosts!r}.", "export MASTER_ADDR=<host of rank 0>")
        return None
    return names[0]


def _tasks_here(env: Mapping[str, str], node: int, nodes: int, size: int) -> int:
    """Returns the number of tasks on this host; an equal share of all tasks if SLURM does not say it."""
    counts = task_counts(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
    if len(counts) == nodes and sum(counts) == size and node < nodes:
        return counts[node]
    return -(-size // nodes)


def task_counts(text: str) -> list[int]:
    """Returns the number of tasks on each node: "2(x3),1" is [2, 2, 2, 1]; [] if the text has another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand(hosts: str) -> list[str]:
    """Returns the names of a list in SLURM's short form: "gpu[1-2,07]-ib,login" is [gpu1-ib, gpu2-ib, gpu07-ib, login]."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())
        # `re.split` returns the text in brackets at the odd places.
        choices: list[list[str]] = []
        for place, piece in enumerate(pieces):
            in_brackets = place % 2 == 1
            choices.append(_range(piece) if in_brackets else [piece])
        names += map("".join, itertools.product(*choices))
    return [name for name in names if name]


def _range(text: str) -> list[str]:
    """Returns the numbers of ranges, as text: "1-3,07-08" is [1, 2, 3, 07, 08]. Leading zeros are kept."""
    numbers: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if high.isdecimal() and low.isdecimal():
            numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        else:
            numbers.append(part)
    return numbers


DETECT = detect
