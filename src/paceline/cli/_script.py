"""What the commands share that start, tune, plan or verify a script: its place on the command line, and a line of progress."""

from __future__ import annotations

import argparse
import sys
import time

from paceline.base.errors import ConfigError


def add_script(parser: argparse.ArgumentParser, what: str = "Python file; with -m a module") -> None:
    """Adds the script and its arguments, which end the command line."""
    parser.add_argument("script", nargs="?", help=what)
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def need_script(args: argparse.Namespace, command: str, options: str) -> None:
    """Refuses a command line without a script.

    Args:
        args: the command line.
        command: such as "paceline tune".
        options: of an example.

    Raises:
        ConfigError: `command-line`.
    """
    if args.script is None:
        fix = f"name it after the options: `{command} {options} train.py --lr 0.1`"
        raise ConfigError("command-line", f"`{command}` needs a script.", fix=fix)


def script_words(args: argparse.Namespace) -> list[str]:
    """The script's arguments; `--` once stood between the script and them."""
    words: list[str] = args.script_args
    return words[1:] if words[:1] == ["--"] else words


class Progress:
    """Says on standard error what is being done: one line that changes in a terminal, a line for each step elsewhere."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_terminal = sys.stderr.isatty()
        self._begun = time.monotonic()

    def show(self, step: str) -> None:
        """Shows a step, after the seconds since the beginning."""
        line = f"{self._command}: {time.monotonic() - self._begun:4.1f} s  {step}"
        if self._is_terminal:
            print(f"\r\x1b[K{line} ...", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A line on standard error that stays."""
    print(f"paceline: {line}", file=sys.stderr, flush=True)
