"""`accelerate launch`: runs `paceline launch` with accelerate's names served.

accelerate launch --num_processes 2 train.py --lr 0.1
    -> paceline launch --compat accelerate --num_processes 2 train.py --lr 0.1

`dialect` and `engine_fields` say what each flag means, and refuse by name the flags that are not supported. The parser of
this module is for programs that parse accelerate's flags themselves, such as trl's own command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from paceline.base import env as environment
from paceline.cli import main as command_line
from paceline_accelerate.commands.arguments import StoreValue, Switch, parser_for

_NAME = "Accelerate launch command"
_FLAG_HELP = "see `paceline launch --help`"
_NO_OVERRIDE = (False, False, False)


class LaunchFlag(NamedTuple):
    """A line of `launch_flags.txt`.

    Attributes:
        name: without hyphens at its front.
        kind: "switch" for a flag without a value, else a key of `_TYPES`.
        default: the value of a flag that is not typed.
        choices: the values that it may have; empty for any.
        short: its short form, such as "-q", or "".
    """

    name: str
    kind: str
    default: Any
    choices: tuple[str, ...]
    short: str


@cache
def flags() -> tuple[LaunchFlag, ...]:
    """Returns the flags that take one value or none."""
    text = Path(__file__).with_name("launch_flags.txt").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        name, kind, default, *more = line.split(" ")
        short = ""
        choices: tuple[str, ...] = ()
        for word in more:
            if word.startswith("-"):
                short = word
            else:
                choices = tuple(word.split(","))
        rows.append(LaunchFlag(name, kind, _default(kind, default), choices, short))
    return tuple(rows)


def _default(kind: str, text: str) -> Any:
    """Returns a default for argparse, which parses that of a yes/no flag itself."""
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


def _yes_no_list(text: str) -> tuple[bool, ...]:
    """Parses words such as "true,false,false"."""
    return tuple(environment.parse_bool(word) for word in text.split(","))


_TYPES: dict[str, Any] = {"text": str, "int": int, "float": float, "bool": bool, "yes_no": _yes_no}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate launch`, with the flags and defaults of accelerate 1.15."""
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
        names = [flag.short, f"--{flag.name}"] if flag.short else [f"--{flag.name}"]
        if flag.kind == "switch":
            parser.add_argument(*names, action=Switch, default=flag.default, help=_FLAG_HELP)
        else:
            options = {"type": _TYPES[flag.kind], "choices": flag.choices or None, "default": flag.default}
            parser.add_argument(*names, action=StoreValue, help=_FLAG_HELP, **options)
    add = parser.add_argument
    add(
        "--fp8_override_linear_precision",
        type=_yes_no_list,
        action=StoreValue,
        default=_NO_OVERRIDE,
        help="not supported",
    )
    add("--tpu_cluster", action=Switch, dest="tpu_use_cluster", default=False, help="not supported")
    add("--no_tpu_cluster", action="store_false", dest="tpu_use_cluster", help="no effect: there are no TPUs")
    add("--vm", action="append", type=str, help="not supported: there are no TPUs")
    add("--env", action="append", type=str, help="not supported: there are no TPUs")
    add("training_script", action=StoreValue, type=str, help="the script, followed by its own arguments")
    add("training_script_args", action=StoreValue, nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def words_of(args: argparse.Namespace) -> list[str]:
    """Returns the command line that gives these arguments.

    It holds all values that differ from their defaults. It does not go by `nondefault`, because a program may have set
    attributes itself.
    """
    parser = launch_command_parser()
    words: list[str] = []
    # argparse has no public list of its actions.
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        # Two flags set `tpu_use_cluster`, and only one of them switches it on.
        is_flag = bool(action.option_strings) and action.dest not in ("help", "tpu_use_cluster")
        if is_flag and value not in (None, _parsed_default(action)):
            words += _words_of_flag(action, value)
    if getattr(args, "tpu_use_cluster", False):
        words.append("--tpu_cluster")
    script_args = getattr(args, "training_script_args", None) or []
    return [*words, args.training_script, *script_args]


def _parsed_default(action: argparse.Action) -> Any:
    """Returns the default as `parse_args` gives it: argparse parses a default that is text."""
    if isinstance(action.default, str) and action.type is not None:
        return action.type(action.default)  # type: ignore[operator]
    return action.default


def _words_of_flag(action: argparse.Action, value: object) -> list[str]:
    """Returns the words that give a flag this value."""
    name = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        return [name] if value else []
    # A flag that may be typed several times has a list of values.
    entries = [value]
    if isinstance(value, list):
        entries = value
    words: list[str] = []
    for entry in entries:
        text = str(entry)
        if isinstance(entry, tuple):
            text = ",".join(map(str, entry))
        words += [name, text]
    return words


def launch_command(args: argparse.Namespace) -> None:
    """Runs a script as `accelerate launch` with these arguments does.

    Raises:
        SystemExit: with the exit code of the first process that failed.
    """
    code = run(words_of(args))
    if code:
        sys.exit(code)


# accelerate has a function for each way of starting processes. Here there is one way.
multi_gpu_launcher = simple_launcher = deepspeed_launcher = launch_command


def run(words: Sequence[str]) -> int:
    """Runs `paceline launch` with accelerate's names served; returns the exit code."""
    others = [name for name in environment.get("PACELINE_COMPAT").split(",") if name not in ("", "accelerate")]
    # A script of transformers' imports DeepSpeed where it is given a config for it.
    asks_for_deepspeed = any(word == "--deepspeed" or word.startswith("--deepspeed=") for word in words)
    if asks_for_deepspeed and "deepspeed" not in others and PathFinder.find_spec("deepspeed") is None:
        others.append("deepspeed")
    libraries = ",".join(["accelerate", *others])
    return command_line.main(["launch", "--compat", libraries, *words])


def main() -> int:
    """Runs the command `accelerate-launch`."""
    words = sys.argv[1:]
    if words in ([], ["-h"], ["--help"]):
        launch_command_parser().print_help()
        return 0 if words else 2
    return run(words)
