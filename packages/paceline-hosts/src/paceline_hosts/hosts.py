"""Makes the job for settings that name other hosts, or a launcher that chooses hosts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.base.errors import ConfigError, LaunchError, Problem
from paceline.config.kinds import least_and_most
from paceline.config.sources import Launch
from paceline.launch.job import Job, Reach
from paceline.launch.launcher import LAUNCHERS
from paceline.launch.make_job import hosts_of, of_other_launchers, target_of
from paceline.launch.script_libraries import script_libraries
from paceline_hosts import hostfile
from paceline_hosts.assignment import VARIABLE, Assignment
from paceline_hosts.hostfile import Slots

_OF_ONE_NODE = ("node_rank", "gpu_ids")
# Variables with these prefixes are sent to the other hosts, and so are the lines of files that libraries name for that
# (`ScriptLibrary.host_variables`). They travel inside the connection: no value appears on a command line or in a log.
PREFIXES = ("PACELINE_", "PYTHON", "OMP_", "NCCL", "GLOO", "TORCH", "UCX", "MV2", "MLFLOW")
# These also match a prefix, but belong to one process: a launcher inside a run would send its own rank to other hosts.
_OURS = ("TORCHELASTIC_", "PACELINE_RUN", "PACELINE_STACKS_DIR", "PACELINE_SETTINGS", VARIABLE)


def job_on_hosts(
    settings: Launch,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    local_rank: bool = False,
    activate: str = "",
) -> Job:
    """Returns the job, for the launcher that the settings name.

    Args:
        settings: the merged settings; they name a hostfile, or a launcher that chooses hosts.
        script: path of a file, name of a module, or a program.
        args: the script's own arguments.
        env: the environment of this process.
        local_rank: whether `--local_rank=N` goes before them.
        activate: a shell script to be sourced on each host first; "" for none.

    Raises:
        ConfigError: `hostfile`, `host-filter`, `host-flags`, `unknown-name`.
        LaunchError: `launch-launcher`, where the launcher cannot be used here; `launch-env-file`.
    """
    launch = settings.launch
    cwd = os.getcwd()
    launcher = LAUNCHERS.get(launch.launcher)
    # A dry run also works on a host without the launcher.
    missing = "" if launch.dry_run else launcher.available()
    if missing:
        usable = [other.name for other in LAUNCHERS if other.name != "local" and not other.available()]
        fix = "install it"
        if usable:
            fix += f", or choose another: {', '.join(usable)}"
        raise LaunchError(
            "launch-launcher",
            f"the launcher {launch.launcher} cannot be used: {missing}.",
            f"--on {launch.launcher}",
            fix,
        )
    variables = forwarded(env, cwd)
    hosts = chosen(settings)
    most_slots = max(len(slots.ids) for slots in hosts)
    least, _ = least_and_most(launch.nodes)
    if least >= len(hosts):
        least = 0  # a fixed number of nodes
    job = Job(
        replace(target_of(launch, script, args), local_rank=local_rank),
        procs=most_slots,
        nodes=len(hosts),
        least=least,
        main_address=launch.main_address or "",
        main_port=launch.main_port,
        grace_s=launch.grace_s,
        assignment=Assignment(settings, script, tuple(args), cwd, variables, hosts, local_rank),
        reach=Reach(launch.ssh_port, tuple(shlex.split(launch.launcher_args)), activate),
        cluster=settings.cluster.get(launch.launcher),
    )
    if hosts_of(settings) == "chosen" and hasattr(launcher, "placed"):
        job = launcher.placed(job, env)
    return job


def chosen(settings: Launch) -> tuple[Slots, ...]:
    """Returns the hosts and slots of the settings; for a launcher that chooses hosts, as many as are requested.

    Raises:
        ConfigError: `hostfile`, `host-filter`, `host-flags`; all problems of flags at once.
    """
    if hosts_of(settings) == "named":
        return _from_hostfile(settings)
    return _to_be_chosen(settings)


def _from_hostfile(settings: Launch) -> tuple[Slots, ...]:
    launch, given = settings.launch, settings.given
    by_whom = f"--hostfile {launch.hostfile}"
    fix = "leave it out: the order of the hostfile numbers the nodes, --include chooses their slots"
    problems = _of_each_node(settings, by_whom, "a hostfile names all", fix)
    if isinstance(launch.nodes, str):
        what = "a range of nodes cannot be started from one host."
        fix = "give one number, or start the command on each host without --hostfile"
        problems.append(Problem("host-flags", what, f"nodes={launch.nodes} ({given['nodes']})", fix))
    problems += _of_a_store(settings, by_whom)
    if problems:
        raise ConfigError.of(problems)
    assert launch.hostfile is not None, "asked for where there is one"
    # For settings that were not given the hostfile decides, and not the defaults of the settings.
    nodes = int(launch.nodes) if "nodes" in given else None
    procs = None
    if "procs" in given and launch.procs != "auto":
        procs = int(launch.procs)
    hosts = hostfile.read(hostfile.text_of(launch.hostfile), launch.hostfile)
    return hostfile.choose(hosts, include=launch.include, exclude=launch.exclude, nodes=nodes, procs=procs)


def _to_be_chosen(settings: Launch) -> tuple[Slots, ...]:
    """As many hosts as are requested, with placeholder names for those that the launcher will choose."""
    launch = settings.launch
    by_whom = f"--on {launch.launcher}"
    fix = "leave it out: the launcher chooses the hosts and numbers them"
    problems = _of_each_node(settings, by_whom, "the launcher starts all", fix)
    problems += _of_a_store(settings, by_whom)
    problems += _of_a_hostfile(settings)
    if problems:
        raise ConfigError.of(problems)
    procs = launch.gpus_per_node if launch.procs == "auto" else launch.procs
    slots = tuple(range(int(procs or 1)))
    _, most = least_and_most(launch.nodes)
    return tuple(Slots(f"node{number}", slots) for number in range(most))


def _of_each_node(settings: Launch, by_whom: str, all_nodes: str, fix: str) -> list[Problem]:
    """Returns the problems with settings that only apply to one node, or to another launcher.

    Args:
        settings: the merged settings.
        by_whom: the flag that starts all nodes.
        all_nodes: the end of the sentence that says who starts them.
        fix: the fix for a setting of one node.
    """
    launch, given = settings.launch, settings.given
    problems = of_other_launchers(settings, launch.launcher)
    for name in _OF_ONE_NODE:
        if name in given:
            what = f"{name} is of one node, and {all_nodes}."
            problems.append(Problem("host-flags", what, f"{given[name]}; {by_whom}", fix))
    return problems


def _of_a_store(settings: Launch, by_whom: str) -> list[Problem]:
    """Returns the problem with a store by which launchers find each other, where one command starts them all."""
    if settings.launch.store is None:
        return []
    what = "a store is for launchers that are started on each host: here one command starts them, and ends with them."
    fix = "leave it out, or start the command on each host without --hostfile"
    return [Problem("host-flags", what, f"store ({settings.given['store']}); {by_whom}", fix)]


def _of_a_hostfile(settings: Launch) -> list[Problem]:
    """The problems with settings for a launcher without a hostfile: those that have no effect, and those that are missing."""
    launch, given = settings.launch, settings.given
    problems = []
    for name in ("hostfile", "include", "exclude", "ssh_port"):
        if name in given:
            what = f"the launcher {launch.launcher} takes no hostfile."
            why = f"{name}={getattr(launch, name)} ({given[name]})"
            problems.append(Problem("host-flags", what, why, f"leave --{name.replace('_', '-')} out"))
    if launch.procs == "auto" and not launch.gpus_per_node:
        what = f"the launcher {launch.launcher} has to be told how many processes each host runs."
        fix = "say --procs N; on hosts with GPUs --gpus-per-node N is enough: one process for each"
        problems.append(Problem("host-flags", what, "--procs is not set", fix))
    return problems


def forwarded(env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Returns the variables that are sent to the other hosts.

    Args:
        env: the environment of this host. HOME in it, and variables of libraries, say where files with more variables are.
        cwd: the working directory.

    Raises:
        LaunchError: `launch-env-file`, with each line that is wrong.
    """
    variables: dict[str, str] = {}
    for name in sorted(env):
        if name.startswith(PREFIXES) and not name.startswith(_OURS):
            variables[name] = env[name]
    paths: dict[Path, None] = {}
    for library in script_libraries():
        file_name = env.get(library.host_variables_from) or library.host_variables
        if not file_name:
            continue
        # The file in the working directory comes last, so it has precedence. With an absolute path both are the same file.
        for folder in (env.get("HOME"), cwd):
            if folder:
                paths[Path(folder, file_name)] = None
    problems: list[Problem] = []
    for path in paths:
        if path.is_file():
            variables |= _lines(path, problems)
    if problems:
        raise LaunchError.of(problems)
    return variables


def _lines(path: Path, problems: list[Problem]) -> dict[str, str]:
    variables = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not name.strip().isidentifier():
            why = "expected: NAME=VALUE; the line is not shown, as it may hold a secret"
            problems.append(Problem("launch-env-file", f"{path}:{number} sets no variable.", why, "correct that line"))
            continue
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        variables[name.strip()] = value[1:-1] if quoted else value
    return variables
