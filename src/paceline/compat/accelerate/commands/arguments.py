"""The parser of accelerate's commands: hyphens and underscores are one, and what was typed is told from defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--a-b` for `--a_b`, and whose result lists what was typed as `nondefault`."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument under both spellings."""
        return super().add_argument(*_spellings(names), **options)

    def add_argument_group(self, *args: Any, **options: Any) -> CustomArgumentGroup:
        """A group with the same habit."""
        group = CustomArgumentGroup(self, *args, **options)
        self._action_groups.append(group)
        return group


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group of such a parser."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument under both spellings."""
        return super().add_argument(*_spellings(names), **options)


def _spellings(names: Sequence[str]) -> list[str]:
    """The names, each followed by its form with hyphens where that is another one."""
    spellings = []
    for name in names:
        spellings.append(name)
        if name.startswith("--") and "_" in name:
            spellings.append("--" + name[2:].replace("_", "-"))
    return spellings


def clean_option(option: str) -> str | None:
    """The name of a long flag, with underscores: "--a-b" is "a_b"; None for anything else."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


# Name of a flag that asks for a platform -> title of the group of its flags.
options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


class CustomHelpFormatter(argparse.HelpFormatter):
    """A formatter of help, which shows all flags."""


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter of help that keeps the lines of a description."""


class Store(argparse.Action):
    """Stores a value and notes its name in `nondefault`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        note(namespace, self.dest)


class Switch(argparse.Action):
    """Stores True and notes its name in `nondefault`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=True, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True)
        note(namespace, self.dest)


def note(namespace: argparse.Namespace, name: str) -> None:
    """Notes that an argument was typed."""
    namespace.nondefault = getattr(namespace, "nondefault", set()) | {name}


def parser_for(
    name: str,
    title: str,
    run: Callable[[Any], Any],
    subparsers: Any,
    *,
    kind: type = CustomArgumentParser,
    **options: Any,
) -> argparse.ArgumentParser:
    """The parser of one command: one of `subparsers` where they are given, which then calls `run`; else one of its own."""
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser(name, **options)
        parser.set_defaults(func=run)
        return parser
    return kind(title, **options) if title else kind(**options)
