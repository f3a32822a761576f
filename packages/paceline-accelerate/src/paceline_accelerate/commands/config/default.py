"""`accelerate config default`: writes accelerate's config file for this machine without questions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.base.files import expanded
from paceline.config import places
from paceline.config.settings import settings_of
from paceline.launch import host
from paceline_accelerate.commands.config.config_args import ClusterConfig, default_json_config_file
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.kinds import type_of_processes

description = "Writes a config file for this machine without asking."
_PRECISIONS = ("no", "fp16", "bf16")


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | bool:
    """Writes accelerate's config file for this machine; returns its path, or False if there is one already.

    Raises:
        CompatValueError: `compat-argument` for an unknown precision.
        ConfigError: `config-write` where the file cannot be written.
    """
    path = expanded(save_location)
    if path.exists():
        print(f"Configuration already exists at {path}: it is left as it is.")
        return False
    accelerators = host.accelerators()
    num_processes = max(accelerators.count, 1)
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=type_of_processes(accelerators.kind, num_processes),
        mixed_precision=_precision(mixed_precision),
        use_cpu=accelerators.count == 0,
        debug=False,
        num_processes=num_processes,
    )
    # JSON whatever the file is called, as accelerate writes it; YAML reads that too.
    places.write(path, config.as_json())
    return path


def _precision(word: str) -> str:
    try:
        precision: str = settings_of()["mixed_precision"].kind.read(word.lower())
    except ValueError as error:
        raise CompatValueError(
            "compat-argument",
            f"mixed_precision cannot be {word!r}.",
            f"it comes from write_basic_config(mixed_precision=...); expected: {error}",
            'say mixed_precision="no"',
        ) from None
    return precision


def default_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds `default` to the sub-commands of `accelerate config`."""
    default: argparse.ArgumentParser = parser.add_parser("default", parents=parents, help=description)
    help_text = f"the file to write [{default_json_config_file}]"
    default.add_argument(
        "--config_file", "--config-file", dest="save_location", default=default_json_config_file, help=help_text
    )
    default.add_argument(
        "--mixed_precision", "--mixed-precision", choices=_PRECISIONS, default="no", help="precision [no]"
    )
    default.set_defaults(func=default_config_command)
    return default


def default_config_command(args: argparse.Namespace) -> None:
    """Writes the file."""
    path = write_basic_config(args.mixed_precision, args.save_location)
    if path:
        print(f"accelerate configuration saved at {path}")
