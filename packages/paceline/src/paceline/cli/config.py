"""Asks a few questions and writes the answers as a config file.

The file is YAML that `paceline launch` reads. Options answer a question beforehand; `--config` takes the answers from
another file, another library's too, so that `paceline config --default --config old.yaml --output run.yaml` translates it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import ConfigError
from paceline.base.files import expanded
from paceline.config import schema
from paceline.config.places import own_default, write
from paceline.config.settings import Setting, settings_of
from paceline.config.sources import resolve_launch

# These settings stand in every file that is written, whether their questions were answered or not.
WRITTEN = ("procs", "cpu", "mixed_precision", "zero", "accumulate", "nodes")
# What a newcomer has to know for an answer, where the setting's own sentence says it in fewer words.
_QUESTIONS = {
    "cpu": "Train on the CPU, even where there are GPUs?",
    "procs": "How many GPUs of each host? One process runs on each. auto: all that there are.",
    "gpu_ids": "Which GPUs of a host, such as 0,2?",
    "mixed_precision": "Precision: no is float32; bf16 suits GPUs from 2020 on (A100, RTX 30); fp16 older ones.",
    "zero": "Sharding: what do the processes divide among them, instead of each holding all of it? 0: nothing. 1: the "
    "optimizer's states. 2: gradients too. 3: parameters too. auto: nothing, unless `shard` asks for it.",
    "shard": "How many processes share one copy of that? auto: all of them.",
    "accumulate": "How many micro-batches make one optimizer step?",
    "nodes": "How many hosts (nodes)?",
}
_PROCESSES_ON_CPU = "How many processes on each host? auto: 1."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--default", action="store_true", help="ask no questions: use the defaults for what is not given"
    )
    parser.add_argument("--output", metavar="FILE", help="file to write [~/.config/paceline/config.yaml]")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    # A file holds none of these: they are about one launch.
    in_no_file = [
        setting.name for setting in settings_of().values() if not setting.in_file and setting.name != "config"
    ]
    schema.add_options(parser, without=in_no_file)


def run(args: argparse.Namespace) -> int:
    """Asks the questions, writes the file, and prints its name to stdout."""
    resolved = resolve_launch(schema.given(args), {}, search=False)
    settings = settings_of()
    values: dict[str, Any] = {}
    for row in resolved.decisions:
        if row.source != "default" and row.field in settings and settings[row.field].in_file:
            values[row.field] = row.value
    if resolved.run.options:
        values["options"] = resolved.run.options
    path = expanded(args.output) if args.output else own_default(environment.snapshot())
    if not args.default:
        _need_terminal()
        _ask_all(values)
    if path.exists() and not args.force and (args.default or not _ask_yes(f"{path} exists. Replace it?")):
        raise ConfigError("config-exists", f"{path} exists.", fix="say --force to replace it, or --output FILE")
    for name in WRITTEN:
        values.setdefault(name, settings[name].default)
    write(path, as_yaml(values))
    print(path)
    config = f" --config {args.output}" if args.output else ""
    _say(f"`paceline launch{config} script.py` uses it.")
    return 0


def as_yaml(values: Mapping[str, Any]) -> str:
    """Returns the text of a config file: the settings in order of definition, each below a comment with its sentence."""
    lines = [
        "# Settings of `paceline launch`. Flags, PACELINE_* variables and the script itself come before this file."
    ]
    for name, setting in settings_of().items():
        if values.get(name) is not None:
            lines += ["", f"# {setting.doc}", f"{name}: {json.dumps(values[name])}"]
    return "\n".join(lines) + "\n"


def _need_terminal() -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "config-terminal",
            "`paceline config` has nobody to ask.",
            why="its input is no terminal",
            fix="`paceline config --default` asks nothing; `--procs 2` and the like set what should differ",
        )


def _ask_all(values: dict[str, Any]) -> None:
    """Asks for the settings that are not in `values` yet, and adds the answers to it."""
    from paceline.launch import host

    _say("Press Enter to keep what stands in brackets.")
    count = host.accelerators().count
    gpus = f"{count} GPU{'s' * (count != 1)}" if count else "no GPU"
    _say(f"This host has {gpus}.")
    try:
        _answer("cpu", values)
        _answer("procs", values, _PROCESSES_ON_CPU if values["cpu"] else "")
        if not values["cpu"] and values["procs"] != "auto":
            _answer("gpu_ids", values)
        _answer("mixed_precision", values)
        _answer("zero", values)
        if values["zero"] not in (0, "auto"):
            _answer("shard", values)
        _answer("accumulate", values)
        _answer("nodes", values)
        if values["nodes"] != 1:
            _answer("main_address", values)
            _answer("main_port", values)
    except EOFError:
        raise ConfigError(
            "config-terminal", "the questions were not answered to the end.", "the input has ended", "answer them all"
        ) from None


def _answer(name: str, values: dict[str, Any], question: str = "") -> None:
    """Asks for one setting, where no option has answered the question beforehand."""
    if name not in values:
        setting = settings_of()[name]
        values[name] = _ask(setting, question or _QUESTIONS.get(name, setting.doc))


def _ask(setting: Setting, question: str) -> Any:
    """Asks until the answer can be parsed; an empty answer means the default."""
    default = "not set" if setting.default is None else schema.shown_value(setting.default)
    _say(f"\n{question}")
    while True:
        answer = _input(f"{setting.name} [{default}]: ")
        if not answer:
            return setting.default
        try:
            return setting.kind.read(answer)
        except ValueError as error:
            _say(f"{answer!r} cannot be read; expected: {error}.")


def _ask_yes(question: str) -> bool:
    return _input(f"\n{question} [no]: ").lower() in ("y", "yes")


def _input(prompt: str) -> str:
    """Reads a line. The prompt goes to stderr, so that stdout holds only data."""
    print(prompt, end="", file=sys.stderr, flush=True)
    return input().strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
