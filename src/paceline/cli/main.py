"""The `paceline` command: finds the sub-command's file, imports that one alone, and prints an error once.

A command is one file of this folder. Its docstring's first line is its help; `configure(parser)` adds its options and
`run(args) -> int` does the work and returns the exit code. Files that begin with `_` are no commands. A folder groups
commands under its name: `checkpoint/ls.py` is `paceline checkpoint ls`.

Exit codes: 2 for a wrong command line or config, 130 after Ctrl-C, 1 for other errors.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.base.errors import ConfigError, PacelineError, Problem

_FOLDER = Path(__file__).parent


class Parser(argparse.ArgumentParser):
    """A parser whose errors have the form of all others."""

    def __init__(self, prog: str, description: str, **options: object) -> None:
        usage = f"{prog} [options]"
        super().__init__(prog=prog, description=description, usage=usage, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError `command-line` instead of leaving the process."""
        raise ConfigError("command-line", f"{self.prog}: {message}", fix=f"`{self.prog} --help` shows what can be said")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses the words after the command's name; an unknown option is an error that names the closest one."""
        own, after = list(words), []
        if self.get_default("after_dashes") is not None and "--" in own:  # the words after it are the script's
            cut = own.index("--")
            own, after = own[:cut], own[cut + 1 :]
        args, unknown = self.parse_known_args(own)
        if unknown:
            raise self._unknown(unknown)
        if after:
            args.after_dashes = after
        return args

    def _unknown(self, words: Sequence[str]) -> ConfigError:
        from paceline.config.accelerate import judge
        from paceline.config.given import Given, nearest

        options = [name for name in self._option_string_actions if name.startswith("--")]
        problems = []
        for word in [each for each in words if each.startswith("-")] or words:
            flag, _, value = word.partition("=")
            known = judge(Given(flag.lstrip("-").replace("-", "_"), value or "true", "command line", flag))
            if isinstance(known, Problem):
                problems.append(known)
            else:
                close = nearest(flag, options)
                fix = f"write {close}" if close else f"`{self.prog} --help` lists the options"
                problems.append(Problem("command-line", f"{self.prog} does not take {flag!r}.", fix=fix))
        return ConfigError.of(problems)  # type: ignore[return-value]


def commands() -> dict[str, str]:
    """Every command with its one line of help, read from its file without importing it."""
    found = {}
    for path in (*_FOLDER.glob("*.py"), *_FOLDER.glob("[!_]*/*.py")):
        if not path.stem.startswith("_") and path.stem != "main":
            with path.open(encoding="utf-8") as file:
                name = " ".join(path.relative_to(_FOLDER).with_suffix("").parts)
                found[name] = file.readline().strip().strip('"').rstrip(".")
    return dict(sorted(found.items()))


def parser_for(name: str) -> Parser:
    """The parser of one command."""
    module = importlib.import_module(f"paceline.cli.{name.replace(' ', '.')}")
    parser = Parser(f"paceline {name}", (module.__doc__ or "").strip().split("\n")[0])
    module.configure(parser)
    parser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `paceline`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except PacelineError as error:
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        import paceline

        print(f"paceline {paceline.__version__}")
        return 0
    known = commands()
    group = {name: line for name, line in known.items() if name.startswith(f"{words[0]} ")}
    if group and words[1:2] in ([], ["-h"], ["--help"], ["help"]):
        print(_table(f"paceline {words[0]} COMMAND [options]", group))
        return 0
    name = " ".join(words[: 2 if group else 1])
    if name not in known:
        from paceline.config.given import nearest

        close = nearest(name, known)
        raise ConfigError(
            "command-line",
            f"there is no command {name!r}.",
            why=f"commands: {', '.join(group or known)}",
            fix=f"write `paceline {close}`" if close else "choose one of these",
        )
    args = parser_for(name).parse(words[len(name.split()) :])
    return int(args.run(args))


def _overview() -> str:
    about = "\n\nRuns the PyTorch training loop that you already have on any number of devices."
    return _table(f"paceline COMMAND [options]{about}", commands())


def _table(usage: str, known: dict[str, str]) -> str:
    width = max(map(len, known), default=0)
    rows = [f"  {name:<{width}}  {line}" for name, line in known.items()]
    more = f"`{usage.split(' [')[0]} --help` shows a command's options."
    return "\n".join([f"usage: {usage}", "", "commands:", *rows, "", more])


if __name__ == "__main__":
    sys.exit(main())
