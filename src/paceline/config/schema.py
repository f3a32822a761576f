"""What follows from the definitions in `settings.py`: command-line options, the JSON schema, the docs table."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from paceline.base.env import Variable
from paceline.config import launchers
from paceline.config.dialects import known_flags
from paceline.config.given import Given
from paceline.config.kinds import YES_NO
from paceline.config.settings import Setting, own_name, settings_of

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


def add_options(
    parser: argparse.ArgumentParser, *classes: type, without: Collection[str] = (), unlisted: Collection[str] = ()
) -> None:
    """Adds an option for each setting of `classes` (of both where none is named).

    Hyphens and underscores are both understood. The spellings of torchrun and of other launchers are taken too, hidden
    from `--help`.

    Args:
        parser: where to add them; `given` reads them back from what it returns.
        classes: `RunSettings`, `LaunchSettings`.
        without: settings that this command does not take.
        unlisted: settings that it takes, so that the options of `paceline launch` can be repeated, and does not use:
            `--help` leaves them out.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in settings_of(*classes).values():
        if each.name in without:
            continue
        if each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        _add_option(groups[each.group], each, listed=each.name not in unlisted)
    of_dialects = known_flags()
    for name, takes in of_dialects.items():
        _add_hidden(parser, name, takes)
    for name, takes, short in launchers.flags():
        if name not in of_dialects:
            _add_hidden(parser, name, takes, short)


def _add_hidden(parser: argparse.ArgumentParser, name: str, takes: bool, short: str = "") -> None:
    """Adds another launcher's flag, which `--help` leaves out."""
    spellings = [*([short] if short else []), *_spellings(name)]
    options: dict[str, Any] = {} if takes else {"nargs": 0, "const": "true"}
    parser.add_argument(*spellings, action=_Note, name=name, help=argparse.SUPPRESS, **options)


def _add_option(group: argparse._ArgumentGroup, each: Setting, *, listed: bool) -> None:
    shown = [*([each.short] if each.short else []), each.flag]
    other = [flag for name in (each.name, *each.aliases) for flag in _spellings(name) if flag not in shown]
    default = "not set" if each.default in (None, "", {}) else shown_value(each.default)
    text = f"{each.doc} [{default}]".replace("%", "%%") if listed else argparse.SUPPRESS
    options: dict[str, Any] = {"action": _Note, "name": each.name}
    options |= {"nargs": 0, "const": "true"} if each.kind is YES_NO else {"metavar": each.kind.metavar}
    group.add_argument(*shown, help=text, **options)
    if other:
        group.add_argument(*other, help=argparse.SUPPRESS, **options)
    if each.kind is YES_NO and each.name not in _PLAIN_SWITCHES:
        options["const"] = "false"
        group.add_argument(*_spellings(f"no_{each.name}"), help=argparse.SUPPRESS, **options)


def launch_flags() -> frozenset[str]:
    """All long flags that `paceline launch` takes, other launchers' too."""
    names = [*known_flags(), *(name for name, _, _ in launchers.flags())]
    for each in settings_of().values():
        names += [each.flag.removeprefix("--"), each.name, *each.aliases]
    return frozenset(flag for name in names for flag in _spellings(name))


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name]))


def given(args: argparse.Namespace) -> tuple[Given, ...]:
    """What the command line said, in order, still unread; other launchers' flags as settings of ours."""
    return launchers.translate(getattr(args, "given", ()))


def words(given: Iterable[Given]) -> list[str]:
    """The words of a command line that says the same again."""
    repeated: list[str] = []
    for each in given:
        setting = settings_of().get(each.name)
        own = settings_of().get(own_name(each.name))
        if own is not None and own.kind is YES_NO:
            repeated.append(each.where)
        elif setting is not None and launchers.knows(_name(each.where)):
            # One flag of another launcher may have said several settings, in other words.
            repeated += [setting.flag, str(each.value)]
        elif own is not None or _takes_value(each.name):
            repeated += [each.where, str(each.value)]
        else:
            repeated.append(each.where)
    return repeated


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _takes_value(name: str) -> bool:
    """Whether a value follows a flag that is no setting of ours."""
    return launchers.takes_value(name) if launchers.knows(name) else known_flags()[name]


def shown_value(value: object) -> str:
    """A value as a person writes it: yes and no for switches."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else "" if value is None else str(value)


def lined_up(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Lines of a table for the terminal: a name, a value, where it comes from, and what there is to say."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for *cells, remark in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, remark]).rstrip())
    return lines


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
    """The environment variables of the settings, for the reference page; other libraries' names after ours."""
    return tuple(
        Variable(name, each.kind.parse, each.default, each.doc)
        for each in settings_of(*classes).values()
        for name in (each.variable, *each.other_variables)
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
        also = [f"`--{name}`" for name in each.aliases] + [f"`{name}`" for name in each.other_variables]
        cells = [f"`{each.name}`", f"`{shown_value(each.default)}`" if each.default not in (None, "", {}) else "not set",
                 each.kind.expected, each.doc, ", ".join([f"`{each.short}`"] * bool(each.short) + also)]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _group_order(*classes: type) -> Any:
    order = {name: rank for rank, name in enumerate(dict.fromkeys(s.group for s in settings_of(*classes).values()))}
    return lambda each: order[each.group]
