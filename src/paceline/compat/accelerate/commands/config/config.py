"""`accelerate config`: asks the questions of `paceline config` and writes the answers as accelerate's own config file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.compat.accelerate.commands.arguments import parser_for
from paceline.compat.accelerate.commands.config.config_args import ClusterConfig, default_config_file
from paceline.compat.accelerate.kinds import DistributedType, type_of_processes
from paceline.config import places

# ZeRO stage -> FSDP's word for it. FSDP has none for stage 1; stage 2 gives the same numbers with less memory.
_STRATEGIES = {1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
# Settings for which accelerate's files have no key. A script says `Accelerator(gradient_accumulation_steps=...)` itself.
_NOT_IN_THE_FILE = {"accumulate": 1, "shard": "auto"}
description = "Asks questions about this machine and writes the answers as accelerate's config file."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate config` alone, without `default` and `update`."""
    title = "Accelerate config command"
    parser = parser_for(
        "config", title, config_command, subparsers, kind=argparse.ArgumentParser, description=description
    )
    parser.add_argument("--config_file", default=None, help=f"the file to write [{default_config_file}]")
    # A parser of its own calls it too: `accelerate-config` may be run without a sub-command.
    parser.set_defaults(func=config_command)
    return parser


def get_cluster_input() -> ClusterConfig:
    """Asks the questions of `paceline config`; returns the answers in accelerate's words.

    Raises:
        ConfigError: `config-terminal`, if there is no terminal.
    """
    from paceline.cli import config as questions
    from paceline.launch import host

    settings: dict[str, Any] = {"cpu": False, "mixed_precision": "no", "nodes": 1, "zero": 0}
    settings |= questions.asked(_NOT_IN_THE_FILE, asks_node_rank=True)
    accelerators = host.Accelerators() if settings["cpu"] else host.accelerators()
    # Both may be text: "auto" for the processes, and a range such as "1:3" for the nodes.
    procs = settings.get("procs")
    nodes = settings["nodes"]
    if not isinstance(procs, int):
        procs = max(accelerators.count, 1)
    if not isinstance(nodes, int):
        nodes = 1
    num_processes = procs * nodes
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=type_of_processes(accelerators.kind or "cpu", num_processes),
        mixed_precision=settings["mixed_precision"],
        use_cpu=bool(settings["cpu"]),
        debug=False,
        num_processes=num_processes,
        num_machines=nodes,
        machine_rank=settings.get("node_rank", 0),
        main_process_ip=settings.get("main_address"),
        main_process_port=settings.get("main_port")
        or None,  # 0 is Paceline's word for a port that the launcher chooses
        gpu_ids=settings.get("gpu_ids"),
    )
    if settings["zero"] in _STRATEGIES:
        config.distributed_type = DistributedType.FSDP
        config.fsdp_config = {"fsdp_version": 1, "fsdp_sharding_strategy": _STRATEGIES[settings["zero"]]}
    return config


get_user_input = get_cluster_input


def config_command(args: argparse.Namespace) -> None:
    """Asks the questions, and writes the file."""
    config = get_user_input()
    path = args.config_file or default_config_file
    text = config.as_json() if str(path).endswith(".json") else config.as_yaml()
    places.write(Path(path), text)
    print(f"accelerate configuration saved at {path}")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate config`, with `default` and `update`."""
    from paceline.compat.accelerate.commands.config import default, update

    parser = config_command_parser(subparsers)
    # Both functions have accelerate's arguments, of which the second is a list of parent parsers.
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(title="subcommands", dest="subcommand")
    default.default_command_parser(commands, [parent])
    update.update_command_parser(commands, [parent])
    return parser


def main() -> int:
    """Runs the command `accelerate-config`."""
    from paceline.compat.accelerate.commands.accelerate_cli import reporting

    args = get_config_parser().parse_args()
    return reporting(lambda: args.func(args))
