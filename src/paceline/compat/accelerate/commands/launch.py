"""`accelerate launch`: `paceline launch` with accelerate's names served.

accelerate launch --num_processes 2 train.py --lr 0.1
    -> paceline launch --compat accelerate --num_processes 2 train.py --lr 0.1

What becomes of each flag stands in `dialect` and `engine_fields`; flags that cannot be served are refused there by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline.base import env as environment
from paceline.cli import main as command_line
from paceline.compat.accelerate.commands.arguments import Store, Switch, parser_for

_NAME = "Accelerate launch command"
_SEE = "see `paceline launch --help`"
_NO_OVERRIDE = (False, False, False)


class Flag(NamedTuple):
    """A line of `launch_flags.txt`."""

    name: str
    kind: str
    default: Any
    choices: tuple[str, ...]
    short: str


@cache
def flags() -> tuple[Flag, ...]:
    """The flags that take one value or none."""
    rows = []
    for line in Path(__file__).with_name("launch_flags.txt").read_text(encoding="utf-8").splitlines():
        name, kind, default, *more = line.split(" ")
        short = ""
        choices: tuple[str, ...] = ()
        for word in more:
            if word.startswith("-"):
                short = word
            else:
                choices = tuple(word.split(","))
        rows.append(Flag(name, kind, _default(kind, default), choices, short))
    return tuple(rows)


def _default(kind: str, text: str) -> Any:
    """A default as its text says it; argparse reads the one of a yes/no flag itself."""
    constants = {"None": None, "True": True, "False": False}
    if text in constants:
        return constants[text]
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    return text.strip('"')


def _yes_no(text: str) -> int:
    return int(environment.parse_bool(text))


def _three(text: str) -> tuple[bool, ...]:
    """ "true,false,false" as a tuple of three."""
    return tuple(environment.parse_bool(word) for word in text.split(","))


_TYPES: dict[str, Any] = {"text": str, "int": int, "float": float, "bool": bool, "yes_no": _yes_no}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate launch`, with the flags and defaults of accelerate 1.15."""
    parser = parser_for(
        "launch",
        _NAME,
        launch_command,
        subparsers,
        description="Launch a python script.",
        add_help=True,
        allow_abbrev=False,
    )
    for flag in flags():
        names = [f"--{flag.name}", flag.short] if flag.short else [f"--{flag.name}"]
        if flag.kind == "switch":
            parser.add_argument(*names, action=Switch, default=flag.default, help=_SEE)
        else:
            options = {"type": _TYPES[flag.kind], "choices": flag.choices or None, "default": flag.default}
            parser.add_argument(*names, action=Store, help=_SEE, **options)
    add = parser.add_argument
    add("--fp8_override_linear_precision", type=_three, action=Store, default=_NO_OVERRIDE, help="not supported")
    add("--tpu_cluster", action=Switch, dest="tpu_use_cluster", default=False, help="not supported")
    add("--no_tpu_cluster", action="store_false", dest="tpu_use_cluster", help="no effect: there are no TPUs")
    add("--vm", action="append", type=str, help="not supported: there are no TPUs")
    add("--env", action="append", type=str, help="not supported: there are no TPUs")
    add("training_script", action=Store, type=str, help="the script, followed by its own arguments")
    add("training_script_args", action=Store, nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def words_of(args: argparse.Namespace) -> list[str]:
    """The command line that gives these arguments: what differs from its default, whoever has set it."""
    parser = launch_command_parser()
    words: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        is_flag = bool(action.option_strings) and action.dest not in ("help", "tpu_use_cluster")
        if is_flag and value not in (None, _default_of(action)):
            words += _spelled(action, value)
    if getattr(args, "tpu_use_cluster", False):
        words.append("--tpu_cluster")
    return [*words, args.training_script, *(getattr(args, "training_script_args", None) or [])]


def _default_of(action: argparse.Action) -> Any:
    """The default as it stands in the result of `parse_args`, which reads those that are text."""
    if isinstance(action.default, str) and action.type is not None:
        return action.type(action.default)  # type: ignore[operator]
    return action.default


def _spelled(action: argparse.Action, value: object) -> Iterator[str]:
    """The words that give an argument this value."""
    name = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        if value:
            yield name
        return
    for entry in value if isinstance(value, list) else [value]:
        text = ",".join(map(str, entry)) if isinstance(entry, tuple) else str(entry)
        yield from (name, text)


def launch_command(args: argparse.Namespace) -> None:
    """Runs a script as `accelerate launch` with these arguments does.

    Raises:
        SystemExit: with the exit code of the first process that failed.
    """
    code = run(words_of(args))
    if code:
        sys.exit(code)


# The ways by which accelerate starts processes are one here.
multi_gpu_launcher = simple_launcher = deepspeed_launcher = launch_command


def run(words: Sequence[str]) -> int:
    """Runs `paceline launch` with accelerate's names served; returns the exit code."""
    served = [name for name in environment.get("PACELINE_COMPAT").split(",") if name not in ("", "accelerate")]
    return command_line.main(["launch", "--compat", ",".join(["accelerate", *served]), *words])


def main() -> int:
    """Runs the command `accelerate-launch`."""
    words = sys.argv[1:]
    if words in ([], ["-h"], ["--help"]):
        launch_command_parser().print_help()
        return 0 if words else 2
    return run(words)
