"""What follows from the definitions in `settings.py`: command-line options, the JSON schema, the docs table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.base.env import Variable
from paceline.config.accelerate import FLAGS, own_name
from paceline.config.given import Given
from paceline.config.kinds import YES_NO
from paceline.config.settings import Setting, settings_of

_PLAIN_SWITCHES = {"module", "no_python", "dry_run"}  # a `--no-...` of these would say nothing


class _Note(argparse.Action):
    """Notes what was typed, unread, in `namespace.given`; `sources` reads it, and reports every problem at once."""

    def __init__(self, *, name: str, **options: Any) -> None:
        super().__init__(**{**options, "dest": "given", "default": argparse.SUPPRESS})
        self.name = name

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        text = values if isinstance(values, str) else str(self.const)
        noted = Given(self.name, text, "command line", option_string or "")
        namespace.given = (*getattr(namespace, "given", ()), noted)


def add_options(parser: argparse.ArgumentParser, *classes: type, accelerate: bool = True) -> None:
    """Adds an option for each setting of `classes` (of both where none is named).

    Hyphens and underscores are both understood; accelerate's spellings too, hidden from `--help`.

    Args:
        parser: where to add them; `given` reads them back from what it returns.
        classes: `RunSettings`, `LaunchSettings`.
        accelerate: also accept those of accelerate's flags that are no setting of ours.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in settings_of(*classes).values():
        if each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        _add_option(groups[each.group], each)
    if accelerate:
        for name, takes in FLAGS.items():
            options: dict[str, Any] = {} if takes else {"nargs": 0, "const": "true"}
            parser.add_argument(*_spellings(name), action=_Note, name=name, help=argparse.SUPPRESS, **options)


def _add_option(group: argparse._ArgumentGroup, each: Setting) -> None:
    shown = [*([each.short] if each.short else []), each.flag]
    other = [flag for name in (each.name, *each.accelerate) for flag in _spellings(name) if flag not in shown]
    default = "not set" if each.default in (None, "", {}) else shown_value(each.default)
    text = f"{each.doc} [{default}]".replace("%", "%%")
    options: dict[str, Any] = {"action": _Note, "name": each.name}
    options |= {"nargs": 0, "const": "true"} if each.kind is YES_NO else {"metavar": each.kind.metavar}
    group.add_argument(*shown, help=text, **options)
    if other:
        group.add_argument(*other, help=argparse.SUPPRESS, **options)
    if each.kind is YES_NO and each.name not in _PLAIN_SWITCHES:
        options["const"] = "false"
        group.add_argument(*_spellings(f"no_{each.name}"), help=argparse.SUPPRESS, **options)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name]))


def given(args: argparse.Namespace) -> tuple[Given, ...]:
    """What the command line said, in order, still unread."""
    return getattr(args, "given", ())


def words(given: Iterable[Given]) -> list[str]:
    """The words of a command line that says the same again."""
    found: list[str] = []
    for each in given:
        own = settings_of().get(own_name(each.name))
        switch = own.kind is YES_NO if own else not FLAGS[each.name]
        found += [each.where] if switch else [each.where, str(each.value)]
    return found


def shown_value(value: object) -> str:
    """A value as a person writes it: yes and no for switches."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else "" if value is None else str(value)


def json_schema(*classes: type) -> dict[str, Any]:
    """JSON schema of a config file, for editors that complete and check YAML."""
    properties = {}
    for each in settings_of(*classes).values():
        if each.in_file:
            properties[each.name] = {"description": each.doc, "default": each.default, **each.kind.schema}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Paceline settings",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def variables(*classes: type) -> tuple[Variable, ...]:
    """The environment variables of the settings, for the reference page; accelerate's names after ours."""
    return tuple(
        Variable(name, each.kind.parse, each.default, each.doc)
        for each in settings_of(*classes).values()
        for name in (each.variable, *each.variables)
    )


def table(*classes: type) -> str:
    """All settings as Markdown tables, one a group."""
    lines: list[str] = []
    group = ""
    for each in sorted(settings_of(*classes).values(), key=_group_order(*classes)):
        if each.group != group:
            group = each.group
            lines += ["", f"### {group[0].upper()}{group[1:]}", ""]
            lines += ["| setting | default | values | what it does | also |", "|---|---|---|---|---|"]
        also = [f"`--{name}`" for name in each.accelerate] + [f"`{name}`" for name in each.variables]
        cells = [f"`{each.name}`", f"`{shown_value(each.default)}`" if each.default not in (None, "", {}) else "not set",
                 each.kind.expected, each.doc, ", ".join([f"`{each.short}`"] * bool(each.short) + also)]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _group_order(*classes: type) -> Any:
    order = {name: rank for rank, name in enumerate(dict.fromkeys(s.group for s in settings_of(*classes).values()))}
    return lambda each: order[each.group]
