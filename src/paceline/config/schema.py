"""What follows from the definitions in `settings.py`: command-line options and the docs table."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from paceline.base.env import Variable
from paceline.config import launchers
from paceline.config.dialects import known_flags, known_shorts
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
    for setting in settings_of(*classes).values():
        if setting.name in without:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add_option(groups[setting.group], setting, listed=setting.name not in unlisted)
    of_dialects = known_flags()
    shorts = known_shorts()
    for name, takes in of_dialects.items():
        _add_hidden(parser, name, takes, shorts.get(name, ""))
    for name, takes, short in launchers.flags():
        if name not in of_dialects:
            _add_hidden(parser, name, takes, short)


def _add_hidden(parser: argparse.ArgumentParser, name: str, takes: bool, short: str = "") -> None:
    """Adds another launcher's flag, which `--help` leaves out."""
    spellings = _spellings(name)
    if short:
        spellings.insert(0, short)
    options: dict[str, Any] = {} if takes else {"nargs": 0, "const": "true"}
    parser.add_argument(*spellings, action=_Note, name=name, help=argparse.SUPPRESS, **options)


def _add_option(group: argparse._ArgumentGroup, setting: Setting, *, listed: bool) -> None:
    shown = [setting.short, setting.flag] if setting.short else [setting.flag]
    hidden = []
    for name in (setting.name, *setting.aliases):
        hidden += [flag for flag in _spellings(name) if flag not in shown]
    is_switch = setting.kind is YES_NO
    text = argparse.SUPPRESS
    if listed:
        text = f"{setting.doc} [{_shown_default(setting) or 'not set'}]".replace("%", "%%")
    options: dict[str, Any] = {"action": _Note, "name": setting.name}
    options |= {"nargs": 0, "const": "true"} if is_switch else {"metavar": setting.kind.metavar}
    group.add_argument(*shown, help=text, **options)
    if hidden:
        group.add_argument(*hidden, help=argparse.SUPPRESS, **options)
    if is_switch and setting.name not in _PLAIN_SWITCHES:
        options["const"] = "false"
        group.add_argument(*_spellings(f"no_{setting.name}"), help=argparse.SUPPRESS, **options)


def launch_flags() -> frozenset[str]:
    """All long flags that `paceline launch` takes, other launchers' too."""
    names = [*known_flags(), *(name for name, _, _ in launchers.flags())]
    for setting in settings_of().values():
        names += [setting.flag.removeprefix("--"), setting.name, *setting.aliases]
    flags: set[str] = set()
    for name in names:
        flags.update(_spellings(name))
    return frozenset(flags)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name]))


def given(args: argparse.Namespace) -> tuple[Given, ...]:
    """What the command line said, in order, still unread; other launchers' flags as settings of ours."""
    return launchers.translate(getattr(args, "given", ()))


def words(given: Iterable[Given]) -> list[str]:
    """The words of a command line that says the same again."""
    repeated: list[str] = []
    for value in given:
        flag = value.where
        setting = settings_of().get(own_name(value.name))
        is_switch = setting is not None and setting.kind is YES_NO
        if setting is not None and setting.name == value.name and launchers.knows(flag.lstrip("-").replace("-", "_")):
            # One flag of another launcher may have said several settings, in other words.
            flag = setting.flag
        if setting is not None:
            takes_value = not is_switch
        elif launchers.knows(value.name):
            takes_value = launchers.takes_value(value.name)
        else:
            takes_value = known_flags()[value.name]
        repeated += [flag, str(value.value)] if takes_value else [flag]
    return repeated


def shown_value(value: object) -> str:
    """A value as a person writes it: yes and no for switches."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _shown_default(setting: Setting) -> str:
    return "" if setting.default == {} else shown_value(setting.default)


def lined_up(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Lines of a table for the terminal, its columns lined up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(indent + "  ".join(padded).rstrip())
    return lines


def variables(*classes: type) -> tuple[Variable, ...]:
    """The environment variables of the settings, for the reference page; other libraries' names after ours."""
    rows = []
    for setting in settings_of(*classes).values():
        for name in (setting.variable, *setting.other_variables):
            rows.append(Variable(name, setting.kind.parse, setting.default, setting.doc))
    return tuple(rows)


def table(*classes: type) -> str:
    """All settings as Markdown tables, one a group."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings_of(*classes).values():
        groups.setdefault(setting.group, []).append(setting)
    lines: list[str] = []
    for group, settings in groups.items():
        lines += ["", f"### {group[0].upper()}{group[1:]}", ""]
        lines += ["| setting | default | values | what it does | also |", "|---|---|---|---|---|"]
        for setting in settings:
            default = _shown_default(setting)
            default = f"`{default}`" if default else "not set"
            also = [f"`--{alias}`" for alias in setting.aliases]
            also += [f"`{variable}`" for variable in setting.other_variables]
            if setting.short:
                also.insert(0, f"`{setting.short}`")
            cells = [f"`{setting.name}`", default, setting.kind.expected, setting.doc, ", ".join(also)]
            escaped = [cell.replace("|", "\\|") for cell in cells]
            lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines[1:]) + "\n"
