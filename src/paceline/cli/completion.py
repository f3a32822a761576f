"""Prints what bash, zsh or tcsh needs to complete commands, options and files.

bash:  add the line  eval "$(paceline completion bash)"  to ~/.bashrc
zsh:   paceline completion zsh > FOLDER/_paceline, where FOLDER is in $fpath
tcsh:  paceline completion tcsh > FILE, and  source FILE  in ~/.tcshrc
"""

from __future__ import annotations

import argparse

from paceline.base.errors import ConfigError

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("script", "script_args", "hostfile", "config", "output")
_FOLDERS = ("folder", "log_dir", "results", "watch_dir", "watched_run")


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes the name of the shell."""
    parser.usage = "paceline completion SHELL"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh or tcsh")


def run(args: argparse.Namespace) -> int:
    """Prints the script.

    Raises:
        ConfigError: `completion-shtab`, where shtab is not installed.
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
            kind = getattr(action, "name", action.dest)  # a setting's option notes its name beside `given`
            if kind in _FILES or action.metavar == "FILE":
                action.complete = files  # type: ignore[attr-defined]
            elif kind in _FOLDERS:
                action.complete = folders  # type: ignore[attr-defined]
    return root
