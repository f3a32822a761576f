"""Makes the `Job` from the settings of `paceline launch` and the facts of this host."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Collection, Mapping, Sequence

from paceline.base.devices import device_type
from paceline.base.errors import ConfigError, LaunchError, Problem
from paceline.base.host_port import host_and_port
from paceline.base.lazy import fast_imports
from paceline.base.parts import missing
from paceline.config.kinds import least_and_most
from paceline.config.settings import LaunchSettings
from paceline.config.sources import Launch
from paceline.launch import host
from paceline.launch.job import NEW_FOLDER, Job, Target
from paceline.launch.launcher import JOBS_ELSEWHERE, LAUNCHERS, Hosts
from paceline.world.detect.kubernetes import counts_pods
from paceline.world.world import World

_NEEDS_HOSTS = ("include", "exclude", "ssh_port", "launcher", "launcher_args")
_SEVERAL_NODES_PORT = 29500
_MOST_CORES = 65_536
_CROWDED = 8  # processes for each core
# Only names that hardly any script uses itself: a notice about a flag of the script would be wrong each time.
WIDTH_FLAGS = ("--procs", "--nproc-per-node", "--num-processes")


def job_of(settings: Launch, script: str, args: Sequence[str], env: Mapping[str, str]) -> tuple[Job, list[str]]:
    """Returns the job, and notices for the user.

    Args:
        settings: the merged settings.
        script: path of a file, name of a module, or a program.
        args: the script's own arguments.
        env: the environment of the launcher.

    Raises:
        ConfigError: `host-flags`, where a hostfile names other hosts; `bind-cores`; `config-value`.
        LaunchError: `launch-tasks`, `launch-address`, `launch-store`.
    """
    launch, run = settings.launch, settings.run
    if launch.hostfile is not None:
        raise ConfigError(
            "host-flags",
            "this starts processes of this host alone, and a hostfile names others.",
            f"hostfile={launch.hostfile} ({settings.given['hostfile']})",
            "leave it out, or start the script with `paceline launch --hostfile`",
        )
    notices: list[str] = []
    accelerators = _accelerators(settings)
    target = target_of(launch, script, args)
    procs = _procs(settings, accelerators, target, notices)
    cores = _cores(settings, procs)
    variables = {**settings.hand_over(), **_threads(settings, procs, env, notices, cores)}
    if launch.gpu_ids != "all":
        # Each library of a vendor hides devices by a variable of its own.
        variables[_hiding(accelerators, settings)] = launch.gpu_ids
    if launch.compat:
        variables["PACELINE_COMPAT"] = launch.compat
    place, numbered = _place(settings, env, notices)
    # Not compared with `place.nodes`: under srun without --nodes the setting is 1, and the tasks are a fixed number.
    least, most = least_and_most(launch.nodes)
    if least >= most:
        least = 0
    rendezvous_options = dict(pair.split("=", 1) for pair in launch.rdzv_conf.split(",") if pair)
    watch = run.watch_dir or ""
    if not watch and (launch.watch or launch.metrics_port is not None):
        watch = NEW_FOLDER
    job = Job(
        target,
        procs=procs,
        nodes=place.nodes,
        least=least,
        node_rank=place.node,
        numbered=numbered,
        main_address=place.address or "127.0.0.1",
        main_port=place.port or 0,
        # A device that an import has initialised in the parent cannot be used in its forks (CUDA refuses it).
        start="exec" if accelerators.count or launch.no_python else "fork",
        env=variables,
        max_restarts=launch.max_restarts,
        grace_s=launch.grace_s,
        monitor_interval_s=launch.monitor_interval_s,
        timeout_s=run.timeout_s or 600.0,
        log_dir=launch.log_dir,
        tee=_streams(settings, procs),
        ranks=shown_ranks(settings, procs),
        backend=launch.rdzv_backend,
        options=rendezvous_options,
        compat=launch.compat or "",
        cores=cores,
        core_files=launch.cores,
        on_hang=launch.on_hang,
        store=launch.store or "",
        tls=launch.tls,
        watch=watch,
        metrics_port=launch.metrics_port,
    )
    return job, notices


def _procs(settings: Launch, accelerators: host.Accelerators, target: Target, notices: list[str]) -> int:
    """Returns how many processes this node runs. Adds a notice if the user may have meant more."""
    launch = settings.launch
    procs = launch.procs
    if isinstance(procs, str):  # "auto"
        procs = launch.gpus_per_node or max(accelerators.count, 1)
    misplaced = flag_for_script(target.args, WIDTH_FLAGS)
    if misplaced and "procs" not in settings.given:
        corrected = shlex.join(["paceline", "launch", *misplaced.split(), target.name])
        notices.append(
            f"{procs} process{'es' * (procs > 1)}, as `{misplaced}` stands after the script, which gets it; "
            f"for more processes write it before the script: `{corrected}`."
        )
    elif launch.procs == "auto" and not launch.gpus_per_node and not accelerators.count:
        notices.append("1 process, as there is no accelerator; `--procs 2` starts two on the CPU.")
    cores = host.cores()
    # A count that was mistyped (500 for 50) makes the machine unusable for minutes, and nothing else says why.
    if not accelerators.count and procs >= _CROWDED * cores:
        notices.append(f"{procs} processes take turns on {cores} core{'s' * (cores > 1)}, which is slow: start fewer.")
    return procs


def target_of(launch: LaunchSettings, script: str, args: Sequence[str]) -> Target:
    """Returns the target of each process."""
    kind = "script"
    if launch.no_python:
        kind = "program"
    elif launch.module:
        kind = "module"
    return Target(kind, script, tuple(args))


def flag_for_script(args: Sequence[str], flags: Collection[str]) -> str:
    """Returns the first flag of the launcher among the arguments of a script, with its value; "" for none."""
    for place, word in enumerate(args):
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") in flags:
            value = [] if equals else args[place + 1 : place + 2]
            return " ".join([word, *value])
    return ""


def _place(settings: Launch, env: Mapping[str, str], notices: list[str]) -> tuple[World, bool]:
    """Returns the place of this launcher among all nodes, and whether the user has numbered the nodes.

    The settings decide. If they do not set the number of nodes, srun or mpirun does, under which this launcher may run.

    Raises:
        LaunchError: `launch-tasks`, `launch-address`, `launch-store`.
    """
    launch, given = settings.launch, settings.given
    # RANK means that another launcher has started this process as a rank, so its numbers do not count launchers. The training
    # operator of Kubernetes sets it too, and counts pods.
    is_rank = "RANK" in env and not counts_pods(env)
    if "nodes" not in given and not is_rank:
        around = World.detect(env)
        if around.size > 1:
            return _place_among_tasks(around, launch, notices), True
    _, most = least_and_most(launch.nodes)
    # The c10d backend of torchrun does not number nodes, so a machine rank in a config file has no meaning with it.
    counts_nodes = launch.rdzv_backend == "static"
    numbered = "node_rank" in given and counts_nodes
    node_rank = launch.node_rank
    index = env.get("JOB_COMPLETION_INDEX", "")
    if most > 1 and "node_rank" not in given and counts_nodes and index.isdecimal():
        # An Indexed Job of Kubernetes numbers its pods. The number of a single node counts something else.
        numbered = True
        node_rank = int(index)
    if launch.store and launch.main_address is not None:
        raise LaunchError(
            "launch-store",
            "a store and an address cannot be used together: each is a way for nodes to find each other.",
            why=f"--store (--rdzv-endpoint) names a store, and --main-address says {launch.main_address}",
            fix="remove --main-address: the store holds the addresses of the nodes",
        )
    if launch.store:
        # The order of joining numbers a node that has no number.
        return World(node=node_rank if numbered else 0, nodes=most, port=0), numbered
    if most > 1 and launch.main_address is None and (node_rank > 0 or isinstance(launch.nodes, str)):
        raise LaunchError(
            "launch-address",
            f"node {node_rank} does not know where node 0 is." if numbered else "the nodes do not know each other.",
            why="--main-address is not set",
            fix="give --main-address, the host name or IP address of node 0, on all nodes",
        )
    address = launch.main_address
    port = launch.main_port
    # Several addresses stay together: the launchers ask at each of them. A run on one node uses the first.
    if address is not None and (most == 1 or "," not in address):
        address, own_port = host_and_port(address.split(",")[0])
        port = int(own_port or port)
    if not port:
        # Several nodes must know the port before they can speak to each other. A single node takes any free one.
        port = _SEVERAL_NODES_PORT if most > 1 else 0
    # A node that was told no address is node 0, for which the others look.
    numbered = numbered or address is None
    node = node_rank if numbered else 0
    return World(node=node, nodes=most, address=address, port=port), numbered


def _place_among_tasks(task: World, launch: LaunchSettings, notices: list[str]) -> World:
    """Returns the place of a launcher that srun or mpirun has started on each node.

    Raises:
        LaunchError: `launch-tasks`, if there are several launchers on this host.
    """
    if task.local_size > 1:
        raise LaunchError(
            "launch-tasks",
            f"{task.local_size} tasks of this host each start a launcher.",
            why=f"the environment of {task.source} says that this is one of {task.size} tasks",
            fix="one launcher on each node (srun --ntasks-per-node=1), or the script itself: srun python train.py",
        )
    notices.append(f"node {task.rank} of {task.size}, as {task.source} says.")
    return World(node=task.rank, nodes=task.size, address=task.address, port=launch.main_port or task.port)


def _accelerators(settings: Launch) -> host.Accelerators:
    if settings.run.cpu:
        return host.Accelerators()
    with fast_imports():
        accelerators = host.accelerators()
        # torch was imported. The next garbage collection would visit all of its objects (0.1 s), so they are frozen before.
        gc.freeze()
    if settings.launch.gpu_ids == "all" or not accelerators.count:
        return accelerators
    return host.Accelerators(accelerators.kind, len(settings.launch.gpu_ids.split(",")))


def _hiding(accelerators: host.Accelerators, settings: Launch) -> str:
    """Returns the variable that hides devices from processes.

    Raises:
        ConfigError: `gpu-ids`.
    """
    # The hosts may be others than this one, which may have none.
    row = device_type(accelerators.kind or "cuda")
    if row.visible:
        return row.visible
    raise ConfigError(
        "gpu-ids",
        f"accelerators of the type {row.name} cannot be hidden from processes.",
        why=f"gpu_ids={settings.launch.gpu_ids} ({settings.given['gpu_ids']}), and no variable is known that names them",
        fix="leave --gpu-ids out",
    )


def _cores(settings: Launch, procs: int) -> tuple[int, ...]:
    """Returns the cores that are divided among the processes; () for no binding.

    Raises:
        ConfigError: `bind-cores`.
    """
    text = settings.launch.bind_cores
    if text == "no":
        return ()
    usable = host.core_numbers()
    cores = usable
    if text != "all":
        cores = tuple(sorted(_numbers(text)))
    strange = [core for core in cores if core not in usable]
    if strange or len(cores) < procs:
        why = [f"bind_cores={text} ({settings.given['bind_cores']}) means {len(cores)} cores"]
        if strange:
            may_use = f"it may use {len(usable)} ({_listed(usable)})"
            why.append(f"this command may not use core {strange[0]}: {may_use}")
        raise ConfigError(
            "bind-cores",
            f"{procs} processes cannot each have cores of their own.",
            why=why,
            fix="name cores that this command may use, at least one for each process, or remove --bind-cores",
        )
    return cores


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list such as "0,2-3"."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        # The first number beyond the cores of any host is refused, so the rest of the range need not be listed.
        end = min(int(last or first), int(first) + _MOST_CORES)
        numbers.update(range(int(first), end + 1))
    return numbers


def _listed(cores: Sequence[int]) -> str:
    """Returns the numbers as text, as a range if possible."""
    if len(cores) > 1 and cores == tuple(range(cores[0], cores[-1] + 1)):
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))


def shown_ranks(settings: Launch, procs: int) -> frozenset[int] | None:
    """Returns the ranks of `--ranks`, whose output is shown; None for all.

    Raises:
        ConfigError: `config-value`, for a rank that cannot exist.
    """
    text = settings.launch.ranks
    if text == "all":
        return None
    ranks = _numbers(text)
    _, most_nodes = least_and_most(settings.launch.nodes)
    size = procs * most_nodes
    missing = [rank for rank in ranks if rank >= size]
    if missing or not ranks:
        raise ConfigError(
            "config-value",
            f"ranks names rank {min(missing)}, and there are {size}." if missing else "ranks names no rank.",
            why=f"ranks={text} ({settings.given['ranks']})",
            fix=f"name ranks from 0 to {size - 1}, such as `--ranks 0`, or leave it out to see the output of all",
        )
    return frozenset(ranks)


def _threads(
    settings: Launch, procs: int, env: Mapping[str, str], notices: list[str], bound: Sequence[int]
) -> dict[str, str]:
    """OMP_NUM_THREADS for each process: the setting, else the number of its own cores, else unchanged, else an equal share."""
    if settings.launch.threads is not None:
        return {"OMP_NUM_THREADS": str(settings.launch.threads)}
    if bound:
        return {"OMP_NUM_THREADS": str(len(bound) // procs)}
    if env.get("OMP_NUM_THREADS"):
        return {}
    # Without the variable each process would start as many threads as there are cores, and the threads would compete.
    cores = host.cores()
    share = max(cores // procs, 1)
    if procs > 1:
        notices.append(
            f"OMP_NUM_THREADS={share} for each of {procs} processes ({cores} cores); `--threads` changes it."
        )
    return {"OMP_NUM_THREADS": str(share)}


def _streams(settings: Launch, procs: int) -> dict[int, int] | None:
    """Returns the streams of `--tee` by local rank. By default with a log directory: both streams of all.

    Raises:
        ConfigError: `config-value`, for a local rank that does not exist.
    """
    text = settings.launch.tee
    if "tee" not in settings.given:
        # If several ranks were chosen, their lines need marks to tell them apart.
        several = len(shown_ranks(settings, procs) or ()) > 1
        if settings.launch.log_dir or several:
            return dict.fromkeys(range(procs), 3)  # 3 is torchrun's number for both standard output and standard error
        return None
    if ":" not in text:
        return dict.fromkeys(range(procs), int(text))
    streams_by_rank: dict[int, int] = {}
    for pair in text.split(","):
        rank, _, streams = pair.partition(":")
        streams_by_rank[int(rank)] = int(streams)
    strange = [rank for rank in streams_by_rank if rank >= procs]
    if strange:
        raise ConfigError(
            "config-value",
            f"tee names local rank {strange[0]}, and there are {procs} processes on a node.",
            why=f"--tee {text}",
            fix=f"name local ranks 0 to {procs - 1}",
        )
    return streams_by_rank


def starts_elsewhere(settings: Launch) -> bool:
    """Returns whether other hosts run the job: the hosts of a hostfile, or hosts that the launcher chooses."""
    if settings.launch.hostfile is not None:
        return True
    return "launcher" in settings.given and hosts_of(settings) == "chosen"


def job_elsewhere(
    settings: Launch,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    local_rank: bool = False,
    activate: str = "",
) -> Job:
    """Returns the job of settings that name other hosts (`starts_elsewhere`).

    `paceline_hosts.hosts.job_on_hosts` explains the arguments.


    Raises:
        ConfigError: `part-missing`, where the extra hosts is not installed; those of `paceline_hosts.hosts.job_on_hosts`.
    """
    if "hosts" not in JOBS_ELSEWHERE.names():
        why = f"hostfile={settings.launch.hostfile} ({settings.given['hostfile']})"
        raise missing("hosts", "the start of processes on the hosts of a hostfile is", why)
    job: Job = JOBS_ELSEWHERE.get("hosts")(settings, script, args, env, local_rank=local_rank, activate=activate)
    return job


def hosts_of(settings: Launch) -> Hosts:
    """Returns where the launcher of the settings starts processes.

    A launcher without `hosts` starts them on those of a hostfile.
    """
    hosts: Hosts = getattr(LAUNCHERS.get(settings.launch.launcher), "hosts", "named")
    if hosts != "either":
        return hosts
    return "chosen" if settings.launch.hostfile is None else "named"


def without_hostfile(settings: Launch) -> None:
    """Checks that no setting was given that only works with a hostfile.

    Raises:
        ConfigError: `host-flags`, naming all of it.
    """
    problems = of_other_launchers(settings, "local")
    if problems:
        raise ConfigError.of(problems)
    idle = []
    for name in _NEEDS_HOSTS:
        if name in settings.given:
            idle.append(f"{name}={getattr(settings.launch, name)} ({settings.given[name]})")
    if idle:
        raise ConfigError(
            "host-flags", "there are no hosts to choose from or to reach.", idle, "name them: --hostfile FILE"
        )


def of_other_launchers(settings: Launch, launcher: str) -> list[Problem]:
    """Returns the problems with settings of other launchers.

    Args:
        settings: the merged settings.
        launcher: the name of the launcher that starts this job.
    """
    given = settings.given
    problems = []
    for other, values in settings.cluster.items():
        for name in vars(values):
            if other != launcher and name in given:
                why = f"{name}={getattr(values, name)} ({given[name]}); the launcher is {launcher}"
                fix = f"leave it out, or say --on {other}"
                problems.append(Problem("host-flags", f"{name} is a setting of the launcher {other}.", why, fix))
    return problems
