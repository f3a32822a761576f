"""The command `accelerate`, which an installed door runs: it finds the sub-command and imports that one alone."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

from paceline.base.errors import ConfigError, PacelineError

_HERE = "paceline_accelerate.commands"
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
        # `paceline launch` parses these words itself: it also takes flags that accelerate's parser does not have.
        from paceline_accelerate.commands import launch

        return launch.run(words[1:])
    parser = argparse.ArgumentParser("Accelerate CLI tool", usage=_USAGE, allow_abbrev=False)
    names = ",".join(_COMMANDS)
    subparsers = parser.add_subparsers(metavar=f"{{{names}}}", help="what to do")
    # Without a known name all parsers are built, for the help and for argparse's message.
    needed_commands = {name: _COMMANDS[name]} if name in _COMMANDS else _COMMANDS
    for module_name, function_name in needed_commands.values():
        module = importlib.import_module(f"{_HERE}.{module_name}")
        make_parser = getattr(module, function_name)
        make_parser(subparsers=subparsers)
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
        prefix = "paceline." if isinstance(error, PacelineError) else ""
        print(f"{prefix}{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's prompt begins in a line of its own, also after an unanswered question
        return 130
    return 0
