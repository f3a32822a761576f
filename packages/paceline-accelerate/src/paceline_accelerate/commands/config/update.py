"""`accelerate config update`: rewrites a config file of an older version with the keys of the current one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.config import places
from paceline_accelerate.commands.config.config_args import default_config_file, load_config_from_file

description = "Adds the keys of newer versions to a config file, and keeps its values."


def update_config(args: argparse.Namespace) -> str:
    """Updates a file in place; returns its path.

    Raises:
        ValueError: the file that was named is not there, or as `load_config_from_file`.
        FileNotFoundError: as `load_config_from_file`.
        ConfigError: `config-write`.
    """
    path: str = args.config_file or default_config_file
    if args.config_file and not Path(path).is_file():
        raise ValueError(f"There is no config file {path!r} to update.")
    config = load_config_from_file(path)
    text = config.as_json() if path.endswith(".json") else config.as_yaml()
    places.write(Path(path), text)
    return path


def update_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds `update` to the sub-commands of `accelerate config`."""
    update: argparse.ArgumentParser = parser.add_parser("update", parents=parents, help=description)
    help_text = f"the file to update [{default_config_file}]"
    update.add_argument("--config_file", "--config-file", default=None, help=help_text)
    update.set_defaults(func=update_config_command)
    return update


def update_config_command(args: argparse.Namespace) -> None:
    """Updates a file, and prints its path."""
    print(f"Successfully updated the configuration file at {update_config(args)}.")
