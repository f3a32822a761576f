"""`accelerate test`: runs `paceline test` with the processes and the devices that a config file names."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paceline.base import env as environment
from paceline.cli import main as command_line
from paceline.config import places
from paceline_accelerate.commands.arguments import parser_for


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate test`."""
    parser = parser_for("test", "Accelerate test command", test_command, subparsers, kind=argparse.ArgumentParser)
    parser.add_argument("--config_file", "--config-file", default=None, help="the config file that says what is tried")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Runs the checks.

    Raises:
        SystemExit: with the exit code, where one failed.
    """
    path = args.config_file or places.default_file(environment.snapshot(), compat="accelerate")
    flags = ["--config", path] if path else []
    code = command_line.main(["test", *flags])
    if code:
        sys.exit(code)
    print("Test is a success! You are ready for your distributed training!")


def main() -> int:
    """Runs the command."""
    test_command(test_command_parser().parse_args())
    return 0
