"""Shared by the commands that start, tune, plan or verify a script: the script's arguments, and the output of progress."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

from paceline.base.errors import ConfigError


def add_script(parser: argparse.ArgumentParser, what: str = "Python file; with -m a module") -> None:
    """Adds the script and its arguments. All words after the script are its own."""
    parser.add_argument("script", nargs="?", help=what)
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def need_script(args: argparse.Namespace, command: str, options: str) -> None:
    """Refuses a command line without a script.

    Args:
        args: the command line.
        command: the command, such as "paceline tune".
        options: options for the example in the error.

    Raises:
        ConfigError: `command-line`.
    """
    if args.script is None:
        fix = f"name it after the options: `{command} {options} train.py --lr 0.1`"
        raise ConfigError("command-line", f"`{command}` needs a script.", fix=fix)


def script_words(args: argparse.Namespace) -> list[str]:
    """Returns the script's arguments, without a `--` between the script and them."""
    words: list[str] = args.script_args
    return words[1:] if words[:1] == ["--"] else words


def misplaced_options(args: argparse.Namespace, flags: Collection[str]) -> list[str]:
    """Returns a notice for each of a command's own options that stands after the script, if the script does not mention it.

    The script gets such a word, and a script that ignores its arguments would run without the option and say nothing.

    Args:
        args: the command line.
        flags: the names of the options, such as "--log-dir".
    """
    from paceline.launch.job import flag_for_script  # `--help` needs none of this

    notices = []
    for flag in flags:
        misplaced = flag_for_script(args.script_args, [flag])
        if misplaced and not mentions(args.script, flag):
            notices.append(
                f"`{misplaced}` stands after the script, so only the script gets it; options of Paceline come before."
            )
    return notices


def mentions(script: str, flag: str) -> bool:
    """Returns whether the text of a script has the name of a flag, so that the flag may be the script's own.

    Returns True for what has no text to look at, such as a module or a program.
    """
    try:
        source = Path(script).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return True
    name = flag.removeprefix("--")
    return name in source or name.replace("-", "_") in source


class Progress:
    """Shows progress on standard error: in a terminal one line that changes, otherwise one line for each step."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_terminal = sys.stderr.isatty()
        self._begun = time.monotonic()

    def show(self, step: str) -> None:
        """Shows the seconds since the beginning, and the name of a step."""
        line = f"{self._command}: {time.monotonic() - self._begun:4.1f} s  {step}"
        if self._is_terminal:
            print(f"\r\x1b[K{line} ...", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the line in a terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
