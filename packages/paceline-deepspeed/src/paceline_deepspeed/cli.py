"""Starts a script for DeepSpeed with the flags of the `deepspeed` command.

paceline deepspeed [options] script.py [arguments of the script]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import ConfigError, LaunchError, Problem
from paceline.base.ours import our_folders
from paceline.base.parts import names_of_parts
from paceline.base.terminal import say
from paceline.cli.script import add_script
from paceline.config.given import Given
from paceline.config.libraries import LIBRARIES
from paceline.config.sources import Launch, resolve_launch
from paceline.launch.launcher import LAUNCHERS

DEFAULT_HOSTFILE = "/job/hostfile"
PORT = 29500
_REMOVED = {
    "elastic_training": "it is no flag here: `paceline launch --nodes LEAST:MOST` takes hosts in and goes on without",
    "min_elastic_nodes": "the least of `paceline launch --nodes LEAST:MOST`",
    "max_elastic_nodes": "the most of `paceline launch --nodes LEAST:MOST`",
}
# Setting of Paceline -> its value, and the flag that gives it. The values None and False mean that it was not given.
Said = dict[str, tuple[object, str]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline deepspeed [options] script.py [arguments of the script]"
    add = parser.add_argument
    add("-H", "--hostfile", metavar="FILE", help=f"file with lines `HOST slots=N` [{DEFAULT_HOSTFILE} if it exists]")
    filters = "HOST[:SLOT,...][@HOST...]"
    add("-i", "--include", default="", metavar=filters, help="hosts, or their slots, to use [all]")
    add("-e", "--exclude", default="", metavar=filters, help="hosts, or their slots, to leave out")
    add("--num_nodes", type=int, default=-1, metavar="N", help="use the first N hosts of the hostfile [all]")
    add(
        "--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N",
        help="processes on each host, on devices 0 to N-1 [one for each device]",
    )  # fmt: skip
    add("--master_addr", metavar="HOST", help="address of the first host [found automatically]")
    add("--master_port", type=int, metavar="PORT", help="port of the first host [a free port; with --no_ssh 29500]")
    add("--node_rank", type=int, default=-1, metavar="N", help="with --no_ssh: number of this host")
    add("--launcher", default="ssh", metavar="NAME", help="ssh, pdsh, openmpi or slurm [ssh]")
    add("--launcher_args", default="", metavar="WORDS", help="further arguments of the launcher, quoted as one")
    add("--ssh_port", type=int, metavar="PORT", help="port of the ssh servers [that of ssh's configuration]")
    add("--no_ssh", action="store_true", help="you start the same command on each host, with its --node_rank")
    add("--force_multi", action="store_true", help="connect to the host of the hostfile, even if it is the only one")
    add("--module", action="store_true", help="the script is the name of a module")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="the script gets no --local_rank=N before its arguments")
    add("--bind_cores_to_rank", action="store_true", help="each process uses only its own cores")
    add("--bind_core_list", metavar="CORES", help="the cores to divide, such as 0-7,9 [all]")
    add("--enable_each_rank_log", metavar="DIR", help="write the output of each process into files in this folder")
    add(
        "--save_pid",
        action="store_true",
        help="write the process number of the command to /tmp/NUMBER.deepspeed while it runs",
    )
    add("--venv_script", metavar="FILE", help="script that each host of the hostfile sources first")
    add("--autotuning", choices=("tune", "run"), help="first find the best configuration, like `paceline tune`")
    add("--no_ssh_check", action="store_true", help="no effect: the check needs no extra connection")
    add(
        "--log_level",
        default="info",
        metavar="LEVEL",
        choices=("debug", "info", "warning", "error", "critical"),
        help="error or critical: no notices [info]",
    )
    add("-q", "--quiet", action="store_true", help="no notices")
    add("--elastic_training", action="store_const", const="", help=argparse.SUPPRESS)
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        add(f"--{name}", help=argparse.SUPPRESS)
    add_script(parser, "Python file; a module's name, or a program")


def run(args: argparse.Namespace) -> int:
    """Runs the script to its end, and returns the exit code of the first rank that failed, or 0."""
    from paceline.cli.launch import carry_out
    from paceline.launch.host import check_target
    from paceline.launch.make_job import job_elsewhere, job_of, target_of

    _check(args)
    env = environment.snapshot()
    notices = _idle(args)
    given, at_hosts = _given(args, env, notices)
    resolved = resolve_launch(given, env)
    if args.autotuning:
        return _tune(args, resolved)
    if at_hosts:
        activate = args.venv_script or ""
        job = job_elsewhere(
            resolved, args.script, args.script_args, env, local_rank=not args.no_local_rank, activate=activate
        )
    else:
        check_target(target_of(resolved.launch, args.script, args.script_args))
        job, more = job_of(resolved, args.script, args.script_args, env)
        # The notices name a flag of `paceline launch`; this command has another one.
        notices += [text.replace("--procs 2", "--num_gpus 2") for text in more]
        job = replace(job, target=replace(job.target, local_rank=not args.no_local_rank))
    if not (args.quiet or args.log_level in ("error", "critical")):
        for notice in (*resolved.notices, *notices):
            say(notice)
    with _pid_file(args.save_pid):
        return carry_out(job, resolved)


def _check(args: argparse.Namespace) -> None:
    """Refuses flags that no longer exist, that exclude each other, or whose values are impossible.

    Raises:
        ConfigError: `deepspeed-flag`, `command-line`; all problems at once.
    """
    problems: list[Problem] = []
    for name, instead in _REMOVED.items():
        if getattr(args, name) is not None:
            problems.append(Problem("deepspeed-flag", f"--{name} cannot be used.", fix=instead))
    if args.script is None:
        fix = "name it after the options: `paceline deepspeed --num_gpus 2 train.py --lr 0.1`"
        problems.append(Problem("command-line", "`paceline deepspeed` needs a script.", fix=fix))
    if args.module and args.no_python:
        fix = "remove --no_python, because a module needs Python"
        problems.append(Problem("deepspeed-flag", "--module and --no_python cannot both be given.", fix=fix))
    launcher_name = args.launcher.lower()
    # The default is pdsh. A launcher of a part that is not installed is refused only where it is needed, for other hosts.
    known = {*LAUNCHERS.names(), *names_of_parts(LAUNCHERS.group)} - {"local"}
    if launcher_name not in known:
        why = f"known: {', '.join(sorted(known))}"
        fix = "use one of these; openmpi serves for any MPI that mpirun belongs to"
        problems.append(Problem("deepspeed-flag", f"there is no launcher {args.launcher!r}.", why, fix))
    for name in ("num_nodes", "num_gpus"):
        if getattr(args, name) == 0 or getattr(args, name) < -1:
            fix = "give a number of at least 1, or remove the flag to use all"
            problems.append(Problem("deepspeed-flag", f"--{name} {getattr(args, name)} leaves nothing.", fix=fix))
    if problems:
        raise ConfigError.of(problems)


def _given(args: argparse.Namespace, env: Mapping[str, str], notices: list[str]) -> tuple[list[Given], bool]:
    """Translates the flags into Paceline's settings, and returns whether processes are started on other hosts."""
    from paceline_hosts import hostfile
    from paceline_hosts.hostfile import text_of
    from paceline_hosts.network.addresses import is_this_host

    served = [library for library in env.get("PACELINE_COMPAT", "").split(",") if library not in ("", "deepspeed")]
    # Libraries that are used with DeepSpeed import accelerate, as peft does. Without that part they fail by themselves.
    # A process that our launcher has started finds our own package of that name.
    spec = PathFinder.find_spec("accelerate")
    is_installed = spec is not None and not (spec.origin or "").startswith(our_folders())
    if "accelerate" not in served and "accelerate" in LIBRARIES.names() and not is_installed:
        served.append("accelerate")
    said: Said = {
        "compat": (",".join([*served, "deepspeed"]), "paceline deepspeed"),
        "module": (args.module, "--module"),
        "no_python": (args.no_python, "--no_python"),
        "main_address": (args.master_addr, "--master_addr"),
        "main_port": (args.master_port, "--master_port"),
        "log_dir": (args.enable_each_rank_log, "--enable_each_rank_log"),
        "tee": ("0" if args.enable_each_rank_log else None, "--enable_each_rank_log"),
    }  # fmt: skip
    if args.bind_cores_to_rank or args.bind_core_list:
        said["bind_cores"] = args.bind_core_list or "all", "--bind_cores_to_rank"
    nodes = args.num_nodes if args.num_nodes > 0 else None
    procs = args.num_gpus if args.num_gpus > 0 else None
    path = args.hostfile
    if not path and os.path.isfile(DEFAULT_HOSTFILE):
        path = DEFAULT_HOSTFILE
    at_hosts = False
    # /dev/null as the hostfile means that only this host takes part, even if the default file exists.
    if not path or path == os.devnull:
        said |= _on_this_host(args, env, nodes or 1, procs, notices)
    else:
        listed = hostfile.read(text_of(path), path)
        hosts = hostfile.choose(listed, include=args.include, exclude=args.exclude, nodes=nodes, procs=procs)
        at_hosts = not args.no_ssh and (len(hosts) > 1 or args.force_multi)
        if at_hosts:
            said |= {
                "hostfile": (path, "--hostfile"),
                "include": (args.include or None, "--include"),
                "exclude": (args.exclude or None, "--exclude"),
                "launcher": (args.launcher.lower(), "--launcher"),
                "launcher_args": (args.launcher_args or None, "--launcher_args"),
                "ssh_port": (args.ssh_port or None, "--ssh_port"),
                "nodes": (nodes, "--num_nodes"),
                "procs": (procs, "--num_gpus"),
            }
        else:
            node = _node(args, len(hosts)) if args.no_ssh else 0
            said |= _slots(hosts[node].ids, path)
            if args.no_ssh and len(hosts) > 1:
                said |= _numbered(args, node, len(hosts))
            elif not is_this_host(hosts[0].host):
                notices.append(f"{hosts[0].host}, the only host, is taken for this one; --force_multi goes there.")
    given = []
    for name, (value, flag) in said.items():
        if value is not None and value is not False:
            given.append(Given(name, str(value), "command line", flag))
    return given, at_hosts


def _on_this_host(
    args: argparse.Namespace, env: Mapping[str, str], nodes: int, procs: int | None, notices: list[str]
) -> Said:
    """Returns the settings for the devices of this host, for a command without a hostfile."""
    from paceline.launch import host
    from paceline_hosts import hostfile

    if nodes > 1 and not args.no_ssh:
        raise ConfigError(
            "host-filter",
            f"{nodes} hosts are asked for, and no hostfile names them.",
            f"--num_nodes {nodes}",
            "name them with --hostfile FILE, or start the command on each with --no_ssh",
        )
    include = args.include
    where = "--num_gpus" if procs else "--include, --exclude"
    chosen_by_flags = bool(include or args.exclude or procs)
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    # CUDA_VISIBLE_DEVICES may also hold UUIDs, which a filter of slots cannot express.
    names_numbers = all(name.strip().isdigit() for name in visible.split(","))
    if visible and chosen_by_flags:
        notices.append(f"CUDA_VISIBLE_DEVICES={visible} is not used, as flags choose the devices.")
    elif visible and names_numbers:
        include = f"localhost:{visible.replace(' ', '')}"
        where = "CUDA_VISIBLE_DEVICES"
    said: Said = {}
    if include or chosen_by_flags:
        # The numbers in flags count all devices of the host, also those that the variable hides.
        with environment.patched({"CUDA_VISIBLE_DEVICES": None}):
            count = host.accelerators().count
        pool = [hostfile.Slots("localhost", tuple(range(count or 1)))]
        (slots,) = hostfile.choose(pool, include=include, exclude=args.exclude, procs=procs, open_ended=not count)
        # `choose` has checked the slots of a filter, but it takes any number of processes.
        if procs and count and procs > count:
            raise LaunchError(
                "launch-slots",
                f"{procs} processes are asked for, and there are {count} devices.",
                f"--num_gpus {procs}",
                f"ask for {count} at most",
            )
        said = _slots(slots.ids, where)
    if args.no_ssh and nodes > 1:
        said |= _numbered(args, _node(args, nodes), nodes)
    return said


def _slots(ids: Sequence[int], where: str) -> Said:
    return {"procs": (len(ids), where), "gpu_ids": (",".join(map(str, ids)), where)}


def _node(args: argparse.Namespace, nodes: int) -> int:
    """Returns the number of this host among several on which the user starts the command (`--no_ssh`)."""
    if not 0 <= args.node_rank < nodes:
        what = f"node {args.node_rank} does not exist." if args.node_rank >= 0 else "which node is this?"
        raise ConfigError(
            "deepspeed-flag",
            f"--no_ssh: {what}",
            f"there are {nodes} hosts",
            f"give each host another --node_rank, 0 to {nodes - 1}, in the order of the hostfile",
        )
    return int(args.node_rank)


def _numbered(args: argparse.Namespace, node: int, nodes: int) -> Said:
    """Returns the settings for this host among several on which the user starts the command (`--no_ssh`)."""
    return {
        "nodes": (nodes, "--no_ssh"),
        "node_rank": (node, "--node_rank"),
        "main_port": (args.master_port or PORT, "--master_port"),
    }


def _idle(args: argparse.Namespace) -> list[str]:
    """Returns what the user should know about flags that have no effect here, or another one than in DeepSpeed."""
    notices = []
    if args.no_ssh_check:
        notices.append("--no_ssh_check has no effect: hosts are checked over the connection that runs them.")
    if args.enable_each_rank_log:
        notices.append(f"the output of rank N goes to {args.enable_each_rank_log}/rankN.out and rankN.err.")
    if args.force_multi and not args.hostfile and not os.path.isfile(DEFAULT_HOSTFILE):
        notices.append("--force_multi has no effect without a hostfile: the processes run on this host.")
    if args.venv_script and not args.hostfile:
        notices.append("--venv_script is for hosts of a hostfile: activate it here before the command.")
    return notices


def _tune(args: argparse.Namespace, resolved: Launch) -> int:
    """Runs `paceline tune`; with `--autotuning run`, it then runs the script with the best configuration."""
    import shlex

    from paceline.cli.main import main
    from paceline_lens.cli.tune import tune
    from paceline_lens.tune import results as tune_results

    tuned, best = tune(resolved, args.script, args.script_args, local_rank=not args.no_local_rank)
    if args.autotuning == "tune":
        return 0
    folder = Path(tuned.task.tuning.results_dir)
    # The first word is `paceline` itself, which `main` does not take.
    words = shlex.split(tune_results.command(tuned, best, folder), comments=True)[1:]
    # Without the file in the command, the script would run with its old config, and not with the best one.
    if str(folder / "ds_config_optimal.json") not in " ".join(words):
        raise ConfigError(
            "tune-run",
            "the best config cannot be run: the script names its config itself.",
            why=f"none of its arguments is --deepspeed_config; the best one is {folder / 'ds_config_optimal.json'}",
            fix="let the script take --deepspeed_config, or name that file in it and start it without --autotuning",
        )
    return main(words)


@contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    """Writes the number of this process into /tmp/NUMBER.deepspeed, where other programs look for it, if `wanted`."""
    pid = os.getpid()
    path = Path("/tmp", f"{pid}.deepspeed")
    if wanted:
        path.write_text(str(pid))
    try:
        yield
    finally:
        # A process that was forked inside the block leaves it here as well, and must not remove the file.
        if wanted and os.getpid() == pid:
            path.unlink(missing_ok=True)
