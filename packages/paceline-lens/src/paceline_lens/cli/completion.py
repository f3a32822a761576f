"""Prints a completion script for bash, zsh, fish or tcsh.

bash:  add the line  eval "$(paceline completion bash)"  to ~/.bashrc
zsh:   paceline completion zsh > FOLDER/_paceline, where FOLDER is in $fpath
fish:  paceline completion fish > ~/.config/fish/completions/paceline.fish
tcsh:  paceline completion tcsh > FILE, and  source FILE  in ~/.tcshrc
"""

from __future__ import annotations

import argparse
import re

from paceline.base.errors import ConfigError

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_FILES = ("script", "script_args", "hostfile", "config", "output")
_FOLDERS = ("folder", "log_dir", "results", "watch_dir", "watched_run")
_FOLDER_METAVARS = ("FOLDER", "DIR", "CHECKPOINT", "RUN", "PATH")
# A setting with few values says them: "report|restart|leave", "no|all|CORES".
_VALUES = re.compile(r"[\w-]+(\|[\w-]+)+")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline completion SHELL"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh, fish or tcsh")


def run(args: argparse.Namespace) -> int:
    """Prints the script.

    Raises:
        ConfigError: `completion-shtab`, where shtab is not installed, or too old for this shell.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(
            "completion-shtab",
            "the script for the shell cannot be written.",
            why="it is made by the package shtab, which is not installed",
            fix="pip install shtab",
        ) from None
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(
            "completion-shtab",
            f"the script for {args.shell} cannot be written.",
            why=f"shtab {shtab.__version__}, which is installed, does not know this shell",
            fix="pip install --upgrade shtab",
        )
    print(shtab.complete(_whole_parser(shtab.FILE, shtab.DIRECTORY), args.shell))
    return 0


def _whole_parser(files: object, folders: object) -> argparse.ArgumentParser:
    """One parser of all commands, as shtab reads them; `paceline` itself has one a command, and loads one alone."""
    from paceline.cli.main import commands, parser_for

    root = argparse.ArgumentParser("paceline", add_help=True)
    branches = root.add_subparsers()
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for name, line in commands().items():
        group, _, rest = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = branches.add_parser(group, help=f"commands about {group}s").add_subparsers()
        branch = groups[group] if group else branches
        parser = branch.add_parser(rest, help=line, parents=[parser_for(name)], add_help=False)
        for action in parser._actions:
            _complete(action, files, folders)
    return root


def _complete(action: argparse.Action, files: object, folders: object) -> None:
    """Notes for shtab what the values of an option are."""
    kind = getattr(action, "name", action.dest)  # a setting's option notes its name beside `given`
    shown = str(action.metavar)
    if kind in _FILES or shown == "FILE":
        action.complete = files  # type: ignore[attr-defined]
    elif kind in _FOLDERS or shown in _FOLDER_METAVARS:
        action.complete = folders  # type: ignore[attr-defined]
    elif action.choices is None and action.option_strings and _VALUES.fullmatch(shown):
        # Words in capitals stand for something else.
        action.choices = [word for word in shown.split("|") if word == word.lower()]
