"""The `paceline` command: finds the sub-command's file, imports that one alone, and prints an error once.

A command is one file, which an entry point of `paceline.commands` names. Its docstring's first line is its help;
`configure(parser)` adds its options and `run(args) -> int` does the work and returns the exit code. A name of two words groups
commands: `paceline checkpoint ls`.

Exit codes: 2 for a wrong command line or config, 130 after Ctrl-C, 1 for other errors.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from paceline.base.errors import ConfigError, PacelineError
from paceline.base.parts import extra_with, missing, names_of_parts
from paceline.base.registry import Registry
from paceline.cli._parser import Parser

COMMANDS = Registry("paceline.commands", "command")


def commands() -> dict[str, str]:
    """Returns command -> its one line of help, read from its file. Importing all commands would make `--help` slow."""
    names = {}
    for name in COMMANDS.names():
        package, _, inside = COMMANDS.module(name).partition(".")
        # The spec of a module inside would import its package, which may load much.
        spec = PathFinder.find_spec(package)
        if spec is not None and spec.origin is not None:
            path = os.path.join(os.path.dirname(spec.origin), f"{inside.replace('.', os.sep)}.py")
            with open(path, encoding="utf-8") as file:
                names[name] = file.readline().strip().strip('"').rstrip(".")
    return names


def parser_for(name: str) -> Parser:
    """Returns the parser of one command, and imports the command."""
    module = COMMANDS.get(name)
    parser = Parser(f"paceline {name}", (module.__doc__ or "").strip().split("\n")[0])
    module.configure(parser)
    parser.set_defaults(run=module.run)
    return parser


def parsed(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses the words after the command's name.

    Raises:
        ConfigError: `command-line`, and those of config dialects; they name all words that the command does not accept.
    """
    args, unknown = parser.parse_known_args(words)
    if unknown:
        # Imported late: only a slip of the pen needs it.
        from paceline.cli._unknown_flags import error_for

        raise error_for(parser, words, unknown)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `paceline`, and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        code = _dispatch(words)
        # A closed pipe shows only when the output is flushed; without this line that would be at exit, outside of `try`.
        sys.stdout.flush()
        return code
    except PacelineError as error:
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # EPIPE: the program that reads the output has ended, as `head` does after some lines.
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print("paceline: a disk is full: the output, or a file of this command, cannot be written", file=sys.stderr)
        # Python flushes the output once more at exit, and would print an error about that.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        return 1


def _open_closed_streams() -> None:
    """Opens the null device in place of each standard stream that is closed, which is None in Python."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The system gives the lowest free descriptor, which is that of the stream. The processes of a run inherit it.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"]:  # `paceline help launch` is `paceline launch --help`
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        about = "\n\nRuns the PyTorch training loop that you already have on any number of devices."
        print(_table(f"paceline COMMAND [options]{about}", commands()))
        return 0
    if words[0] == "--version":
        import paceline

        print(f"paceline {paceline.__version__}")
        return 0
    known = COMMANDS.names()
    group = [name for name in known if name.startswith(f"{words[0]} ")]
    if group and words[1:2] in ([], ["-h"], ["--help"], ["help"]):
        lines = {name: line for name, line in commands().items() if name in group}
        print(_table(f"paceline {words[0]} COMMAND [options]", lines))
        return 0
    name = " ".join(words[: 2 if group else 1])
    if name not in known:
        raise _no_command(name, words, group or known)
    error = _working_directory_error()
    # In a folder that was removed torch cannot be imported, which some commands need for their help.
    if error is not None:
        os.chdir(os.sep)
    args = parsed(parser_for(name), words[len(name.split()) :])
    if error is not None:
        raise error
    return int(args.run(args))


def _working_directory_error() -> ConfigError | None:
    """Returns an error if the working directory does not exist: a command could not read any relative path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return ConfigError(
            "command-line", "the working directory of this command does not exist any more.",
            "it was removed, or replaced by another one of the same name",
            'change to a folder that exists; `cd "$PWD"` enters a new one of the same name',
        )  # fmt: skip
    return None


def _no_command(name: str, words: Sequence[str], commands: Sequence[str]) -> ConfigError:
    of_parts = names_of_parts(COMMANDS.group)
    asked = [" ".join(words[:2]), name, *(of_part for of_part in of_parts if of_part.startswith(f"{name} "))]
    for of_part in asked:
        if of_part in of_parts:
            extra = extra_with(COMMANDS.group, of_part)
            return missing(extra, f"the command `paceline {of_part}` is", f"installed: {', '.join(commands)}")
    from difflib import get_close_matches

    from paceline.config.given import nearest

    # A wrong guess costs little here, as all commands are listed beside it: so more letters may differ than in a flag.
    candidates = [*commands, "--version", "--help"]
    similar = get_close_matches(name, candidates, 1, 0.75)
    close = nearest(name, candidates) or "".join(similar)
    if name == "run":  # torchrun's users expect it
        close = "launch"
    if name.endswith(".py") or (name.startswith("-") and any(word.endswith(".py") for word in words)):
        fix = f"write `{shlex.join(['paceline', 'launch', *words])}`"
    elif close:
        arguments = words[len(name.split()) :]
        fix = f"write `{shlex.join(['paceline', *close.split(), *arguments])}`"
    else:
        fix = "choose one of these"
    return ConfigError("command-line", f"there is no command {name!r}.", f"commands: {', '.join(commands)}", fix)


def _table(usage: str, commands_by_name: dict[str, str]) -> str:
    width = max(map(len, commands_by_name), default=0)
    rows = [f"  {name:<{width}}  {line}" for name, line in commands_by_name.items()]
    more = f"`{usage.split(' [')[0]} --help` shows a command's options."
    return "\n".join([f"usage: {usage}", "", "commands:", *rows, "", more])


if __name__ == "__main__":
    sys.exit(main())
