"""`accelerate tpu-config`: refused, as Paceline drives no TPUs."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.base.errors import CompatError
from paceline.compat.accelerate.commands.arguments import parser_for


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate tpu-config`."""
    title = "Accelerate tpu-config command"
    parser = parser_for("tpu-config", title, tpu_command_launcher, subparsers, kind=argparse.ArgumentParser)
    add = parser.add_argument
    for name in ("config_file", "tpu_name", "tpu_zone", "command_file"):
        add(f"--{name}", default=None, help="not supported")
    for name in ("use_alpha", "install_accelerate", "debug"):
        add(f"--{name}", action="store_true", help="not supported")
    add("--command", action="append", nargs="+", help="not supported")
    add("--accelerate_version", default="latest", help="not supported")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Refuses.

    Raises:
        CompatError: `compat-name`.
    """
    raise CompatError(
        "compat-name",
        "accelerate tpu-config is not carried by Paceline.",
        why="Paceline runs on the CPU and on accelerators that `torch.accelerator` knows, and a TPU is none of them",
        fix="run on such a device: `paceline launch train.py`",
    )


def main() -> int:
    """Runs the command."""
    tpu_command_launcher(tpu_command_parser().parse_args())
    return 0
