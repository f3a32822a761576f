"""`accelerate config`: asks the questions of `questions`, and writes the answers as accelerate's config file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.config import places
from paceline.launch import host
from paceline_accelerate.commands.arguments import parser_for
from paceline_accelerate.commands.config import questions
from paceline_accelerate.commands.config.ask import ask
from paceline_accelerate.commands.config.config_args import ClusterConfig, default_yaml_config_file

description = "Asks questions about this machine and writes the answers as accelerate's config file."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate config` alone, without `default` and `update`."""
    title = "Accelerate config command"
    parser = parser_for(
        "config", title, config_command, subparsers, kind=argparse.ArgumentParser, description=description
    )
    parser.add_argument("--config_file", default=None, help=f"the file to write [{default_yaml_config_file}]")
    # A parser of its own calls it too: `accelerate-config` may be run without a sub-command.
    parser.set_defaults(func=config_command)
    return parser


def get_user_input() -> ClusterConfig:
    """Asks all questions; returns the answers.

    Raises:
        ConfigError: as `ask`.
    """
    ask([questions.ENVIRONMENT], {})
    return get_cluster_input()


def get_cluster_input() -> ClusterConfig:
    """Asks the questions about this machine and its processes; returns the answers.

    Raises:
        ConfigError: as `ask`.
    """
    # torch, which knows the devices, is not imported for this on other systems.
    is_mps = sys.platform == "darwin" and host.accelerators().kind == "mps"
    return questions.cluster_config(ask(questions.CLUSTER, {"_mps": is_mps}))


def config_command(args: argparse.Namespace) -> None:
    """Asks the questions, and writes the file."""
    config = get_user_input()
    path = args.config_file or default_yaml_config_file
    text = config.as_json() if str(path).endswith(".json") else config.as_yaml()
    places.write(Path(path), text)
    print(f"accelerate configuration saved at {path}")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate config`, with `default` and `update`."""
    from paceline_accelerate.commands.config import default, update

    parser = config_command_parser(subparsers)
    # Both functions have accelerate's arguments, of which the second is a list of parent parsers.
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(title="subcommands", dest="subcommand")
    default.default_command_parser(commands, [parent])
    update.update_command_parser(commands, [parent])
    return parser


def main() -> int:
    """Runs the command `accelerate-config`."""
    from paceline_accelerate.commands.accelerate_cli import reporting

    args = get_config_parser().parse_args()
    return reporting(lambda: args.func(args))
