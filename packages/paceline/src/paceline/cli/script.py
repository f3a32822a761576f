"""Shared by the commands that start, tune, plan or verify a script: the script's arguments, and the output of progress."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Collection

from paceline.base.errors import ConfigError
from paceline.config import schema


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


def misplaced_options(args: argparse.Namespace, command: str, flags: Collection[str]) -> list[str]:
    """Returns notices about words after the script that were meant for Paceline, and about those that nobody reads.

    The script gets such a word, and a script that ignores it would run without the option and say nothing.

    Args:
        args: the command line.
        command: the command, such as "paceline launch".
        flags: the names of the command's options, such as "--log-dir".
    """
    rest = list(args.script_args)
    if not rest:
        return []
    # Imported here, because `--help` needs none of these.
    from paceline.cli._other_words import meaning
    from paceline.cli.script_text import reads, reads_arguments
    from paceline.launch.make_job import WIDTH_FLAGS

    given = schema.words(getattr(args, "given", ()))
    stray: list[str] = []
    moved: list[str] = []
    nobody_reads: list[str] = []
    for word in args.script_args:
        flag, equals, _ = word.partition("=")
        is_told = flag.replace("_", "-") in WIDTH_FLAGS  # by `job_of`
        if not flag.startswith("--") or flag == "--" or is_told or reads(args.script, flag):
            continue
        place = rest.index(word)
        is_ours = flag.replace("_", "-") in flags
        switch = is_ours and schema.is_switch(flag)
        has_value = not equals and not switch and rest[place + 1 : place + 2] and not rest[place + 1].startswith("-")
        whole = " ".join(rest[place : place + 1 + bool(has_value)])
        before = whole if is_ours else meaning(whole, [*given, *args.script_args])
        if before:
            stray.append(f"`{whole}`")
            moved.append(before)
            del rest[place : place + 1 + bool(has_value)]
        elif not reads_arguments(args.script):
            nobody_reads.append(f"`{whole}`")
    notices = []
    if stray:
        words = " ".join([command, *given, *moved, shlex.join([args.script, *rest])])
        notices.append(
            f"{' and '.join(stray)}: what stands after the script is for the script, which does not read it; write "
            f"options of Paceline before it: `{words}`."
        )
    if nobody_reads:
        notices.append(f"{' and '.join(nobody_reads)} after the script: {args.script} reads no arguments.")
    return notices


class ScriptProgress:
    """Shows progress on standard error: in a terminal one line that changes, otherwise one line for each step.

    Attributes:
        is_terminal: whether standard error is one.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self.is_terminal = sys.stderr.isatty()
        self._begun = time.monotonic()

    def show(self, step: str) -> None:
        """Shows the seconds since the beginning, and the name of a step."""
        line = f"{self._command}: {time.monotonic() - self._begun:4.1f} s  {step}"
        if self.is_terminal:
            print(f"\r\x1b[K{line} ...", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the line in a terminal."""
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
