"""The argument parser of accelerate's commands, and the classes of `accelerate.commands.utils`.

A flag may be written with hyphens or with underscores. The result of a parser lists the arguments that were typed, so that
a command can tell them from defaults.
"""

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
        """Adds a group whose arguments have both spellings too."""
        group = CustomArgumentGroup(self, *args, **options)
        self._action_groups.append(group)
        return group


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group of arguments of a `CustomArgumentParser`."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument under both spellings."""
        return super().add_argument(*_spellings(names), **options)


def _spellings(names: Sequence[str]) -> list[str]:
    """Returns the names without repetition, each followed by its form with hyphens."""
    spellings = []
    for name in names:
        spellings.append(name)
        if name.startswith("--"):
            spellings.append(name.replace("_", "-"))
    return list(dict.fromkeys(spellings))


def clean_option(option: str) -> str | None:
    """Returns the name of a long flag with underscores ("a_b" for "--a-b"), or None for anything else."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


# Flag that asks for a platform or an engine -> title of the group of its flags in the help.
options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


class CustomHelpFormatter(argparse.HelpFormatter):
    """Formats a help text that shows all flags; accelerate's class hides those of other platforms."""


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats a help text and keeps the line breaks of a description."""


class StoreValue(argparse.Action):
    """Stores a value, or True for a switch, and notes its name in `nondefault`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        namespace.nondefault = getattr(namespace, "nondefault", set()) | {self.dest}


class Switch(StoreValue):
    """A `StoreValue` without a value."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)


def parser_for(
    name: str,
    title: str,
    run: Callable[[argparse.Namespace], object],
    subparsers: Any,
    *,
    kind: type[argparse.ArgumentParser] = CustomArgumentParser,
    **options: Any,
) -> argparse.ArgumentParser:
    """Returns the parser of one command.

    Args:
        name: the command's name among the sub-commands.
        title: the program's name for a parser of its own; "" stands for argparse's default.
        run: called with the parsed arguments by `accelerate`; a parser of its own does not call it.
        subparsers: those of `accelerate`; None makes a parser of its own.
        kind: class of a parser of its own.
        options: for the parser.
    """
    if subparsers is None:
        own_parser: argparse.ArgumentParser = kind(title or None, **options)
        return own_parser
    parser: argparse.ArgumentParser = subparsers.add_parser(name, **options)
    parser.set_defaults(func=run)
    return parser
