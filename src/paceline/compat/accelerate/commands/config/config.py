"""`accelerate config`: asks `paceline config`'s questions and writes the answers as accelerate's own file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.compat.accelerate.commands.arguments import parser_for
from paceline.compat.accelerate.commands.config.config_args import ClusterConfig, cache_dir, default_config_file
from paceline.compat.accelerate.kinds import DistributedType
from paceline.config import places

__all__ = ["cache_dir", "default_config_file"]

description = "Asks questions about this machine and writes the answers as accelerate's config file."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate config` alone, without `default` and `update`."""
    title = "Accelerate config command"
    parser = parser_for(
        "config", title, config_command, subparsers, kind=argparse.ArgumentParser, description=description
    )
    parser.add_argument("--config_file", default=None, help=f"the file to write [{default_config_file}]")
    parser.set_defaults(func=config_command)
    return parser


def get_cluster_input() -> ClusterConfig:
    """Asks `paceline config`'s questions.

    Raises:
        ConfigError: `config-terminal`, where there is nobody to ask.
    """
    from paceline.cli import config as questions
    from paceline.launch import host

    settings: dict[str, Any] = {"cpu": False, "mixed_precision": "no", "nodes": 1, "zero": 0, **questions.asked()}
    devices = 0 if settings["cpu"] else host.accelerators().count
    procs = settings.get("procs", "auto")
    per_node = procs if isinstance(procs, int) else max(devices, 1)
    nodes = settings["nodes"] if isinstance(settings["nodes"], int) else 1
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=_kind(per_node * nodes, devices),
        mixed_precision=settings["mixed_precision"],
        use_cpu=bool(settings["cpu"]),
        debug=False,
        num_processes=per_node * nodes,
        num_machines=nodes,
        main_process_ip=settings.get("main_address"),
        main_process_port=settings.get("main_port"),
        gpu_ids=settings.get("gpu_ids"),
    )
    strategies = {2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
    if settings["zero"] in strategies:
        config.distributed_type = DistributedType.FSDP
        config.fsdp_config = {"fsdp_version": 1, "fsdp_sharding_strategy": strategies[settings["zero"]]}
    return config


get_user_input = get_cluster_input


def _kind(processes: int, devices: int) -> str:
    if processes == 1:
        return "NO"
    return "MULTI_GPU" if devices else "MULTI_CPU"


def config_command(args: argparse.Namespace) -> None:
    """Asks, and writes the file."""
    config = get_user_input()
    path = args.config_file or default_config_file
    text = config.as_json() if str(path).endswith(".json") else config.as_yaml()
    places.write(Path(path), text)
    print(f"accelerate configuration saved at {path}")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate config`, with `default` and `update`."""
    from paceline.compat.accelerate.commands.config import default, update

    parser = config_command_parser(subparsers)
    own_default = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(title="subcommands", dest="subcommand")
    default.default_command_parser(commands, [own_default])
    update.update_command_parser(commands, [own_default])
    return parser


def main() -> int:
    """Runs the command `accelerate-config`."""
    args = get_config_parser().parse_args()
    args.func(args)
    return 0
