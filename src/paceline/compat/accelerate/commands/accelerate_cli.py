"""The command `accelerate`: finds the sub-command, and imports that one alone."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

from paceline.base.errors import ConfigError, PacelineError

_HERE = "paceline.compat.accelerate.commands"
# Sub-command -> the module and the function that makes its parser.
_COMMANDS = {
    "config": ("config.config", "get_config_parser"),
    "env": ("env", "env_command_parser"),
    "estimate-memory": ("estimate", "estimate_command_parser"),
    "launch": ("launch", "launch_command_parser"),
    "merge-weights": ("merge", "merge_command_parser"),
    "test": ("test", "test_command_parser"),
    "to-fsdp2": ("to_fsdp2", "to_fsdp2_command_parser"),
    "tpu-config": ("tpu", "tpu_command_parser"),
}
_USAGE = "accelerate <command> [<args>]"


def main() -> int:
    """Runs `accelerate`; returns the exit code."""
    words = sys.argv[1:]
    name = words[0] if words else ""
    if name == "launch" and words[1:] not in ([], ["-h"], ["--help"]):
        from paceline.compat.accelerate.commands import launch

        return launch.run(words[1:])
    wanted = {name: _COMMANDS[name]} if name in _COMMANDS else _COMMANDS
    parser = argparse.ArgumentParser("Accelerate CLI tool", usage=_USAGE, allow_abbrev=False)
    commands = parser.add_subparsers(metavar=f"{{{','.join(_COMMANDS)}}}", help="what to do")
    for module, function in wanted.values():
        getattr(importlib.import_module(f"{_HERE}.{module}"), function)(subparsers=commands)
    args = parser.parse_args(words)
    if not hasattr(args, "func"):
        parser.print_help()
        return 1
    return reporting(lambda: args.func(args))


def reporting(command: Callable[[], object]) -> int:
    """Runs a command and prints an error once; returns the exit code."""
    try:
        command()
    except (ValueError, OSError, PacelineError) as error:
        name = f"paceline.{type(error).__name__}" if isinstance(error, PacelineError) else type(error).__name__
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
