"""Derives from the definitions in `settings.py` the options of the command line and the tables of the docs."""

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

# These switches have no `--no-...` form: nothing but the flag itself can turn them on, so there is nothing to undo.
_PLAIN_SWITCHES = {"module", "no_python", "dry_run"}


class _Note(argparse.Action):
    """Collects what was typed in `namespace.given` without parsing it.

    `sources` parses it later, together with the other sources, so that all problems are reported at once; argparse would
    stop at the first wrong value.
    """

    def __init__(self, *, name: str, **options: Any) -> None:
        # All options share one destination. Without SUPPRESS, argparse would set it to None before the first option.
        super().__init__(**{**options, "dest": "given", "default": argparse.SUPPRESS})
        self.name = name

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        # An option without a value (`nargs=0`) gets an empty list here, and its `const` stands for the value.
        text = values if isinstance(values, str) else str(self.const)
        noted = Given(self.name, text, "command line", option_string or "")
        namespace.given = (*getattr(namespace, "given", ()), noted)


def add_options(
    parser: argparse.ArgumentParser, *classes: type, without: Collection[str] = (), unlisted: Collection[str] = ()
) -> None:
    """Adds an option for each setting of `classes` (of all classes if none is named).

    Each option can be written with hyphens or with underscores. The flags of torchrun and of other launchers are accepted
    too, but `--help` does not list them.

    Args:
        parser: the parser that gets the options; `given` reads them from the namespace that it returns.
        classes: classes of settings, such as `RunSettings` and `LaunchSettings`.
        without: settings that this command does not accept.
        unlisted: settings that this command accepts and does not use. It accepts them so that a user can repeat the options
            of `paceline launch`; `--help` does not list them.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings_of(*classes).values():
        if setting.name in without:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add_option(groups[setting.group], setting, listed=setting.name not in unlisted)
    dialect_flags = known_flags()
    shorts = known_shorts()
    for name, takes in dialect_flags.items():
        _add_hidden(parser, name, takes, shorts.get(name, ""))
    # argparse refuses to add a flag twice, and a dialect may have a flag of the table of launchers too.
    for name, takes, short in launchers.flags():
        if name not in dialect_flags:
            _add_hidden(parser, name, takes, short)


def _add_hidden(parser: argparse.ArgumentParser, name: str, takes: bool, short: str = "") -> None:
    """Adds another launcher's flag, which `--help` leaves out."""
    spellings = _spellings(name)
    if short:
        spellings.insert(0, short)
    options: dict[str, Any] = {}
    if not takes:
        options = {"nargs": 0, "const": "true"}
    parser.add_argument(*spellings, action=_Note, name=name, help=argparse.SUPPRESS, **options)


def _add_option(group: argparse._ArgumentGroup, setting: Setting, *, listed: bool) -> None:
    shown = [setting.flag]
    if setting.short:
        shown.insert(0, setting.short)
    # `--help` shows one spelling of each option. The other spellings are added as a second, hidden argument.
    hidden = []
    for name in (setting.name, *setting.aliases):
        hidden += [flag for flag in _spellings(name) if flag not in shown]
    is_switch = setting.kind is YES_NO
    text = argparse.SUPPRESS
    if listed:
        # argparse formats help texts with %, so a percent sign has to be doubled.
        text = f"{setting.doc} [{_shown_default(setting) or 'not set'}]".replace("%", "%%")
    options: dict[str, Any] = {"action": _Note, "name": setting.name}
    if is_switch:
        options |= {"nargs": 0, "const": "true"}
    else:
        options["metavar"] = setting.kind.metavar
    group.add_argument(*shown, help=text, **options)
    if hidden:
        group.add_argument(*hidden, help=argparse.SUPPRESS, **options)
    if is_switch and setting.name not in _PLAIN_SWITCHES:
        options["const"] = "false"
        group.add_argument(*_spellings(f"no_{setting.name}"), help=argparse.SUPPRESS, **options)


def launch_flags() -> frozenset[str]:
    """Returns all long flags that `paceline launch` accepts, including those of other launchers."""
    names = [*known_flags()]
    names += [name for name, _, _ in launchers.flags()]
    for setting in settings_of().values():
        names += [setting.flag.removeprefix("--"), setting.name, *setting.aliases]
    flags: set[str] = set()
    for name in names:
        flags.update(_spellings(name))
    return frozenset(flags)


def _spellings(name: str) -> list[str]:
    """Returns a flag with hyphens, and with underscores if that is another spelling."""
    return list(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name]))


def given(args: argparse.Namespace) -> tuple[Given, ...]:
    """Returns the values of the command line in their order, not parsed yet.

    Flags of other launchers are translated into Paceline's settings.
    """
    return launchers.translate(getattr(args, "given", ()))


def is_switch(flag: str) -> bool:
    """Returns whether no value follows a flag of Paceline, such as "--debug"."""
    name = flag.lstrip("-").replace("-", "_")
    return any(setting.flag == flag and setting.kind is YES_NO for setting in settings_of().values()) or name == "auto"


def words(given: Iterable[Given]) -> list[str]:
    """Returns the words of a command line that gives the same values again."""
    repeated: list[str] = []
    for value in given:
        flag = value.where
        setting = settings_of().get(own_name(value.name))
        is_switch = setting is not None and setting.kind is YES_NO
        from_other_flag = launchers.knows(flag.lstrip("-").replace("-", "_"))
        if setting is not None and setting.name == value.name and from_other_flag:
            # The value comes from a flag of another launcher, which may have set several settings at once and with another
            # value. Repeating that flag for each of them would be wrong, so the setting's own flag is written.
            flag = setting.flag
        if setting is not None:
            takes_value = not is_switch
        elif launchers.knows(value.name):
            takes_value = launchers.takes_value(value.name)
        else:
            takes_value = known_flags()[value.name]
        repeated.append(flag)
        if takes_value:
            repeated.append(str(value.value))
    return repeated


def shown_value(value: object) -> str:
    """Returns a value as a person writes it: `yes` or `no` for a bool, "" for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _shown_default(setting: Setting) -> str:
    return "" if setting.default == {} else shown_value(setting.default)


def variables(*classes: type) -> tuple[Variable, ...]:
    """Returns the environment variables of the settings for the reference page.

    Paceline's variable of a setting comes before those of other libraries.
    """
    rows = []
    for setting in settings_of(*classes).values():
        for name in (setting.variable, *setting.other_variables):
            rows.append(Variable(name, setting.kind.parse, setting.default, setting.doc))
    return tuple(rows)


def table(*classes: type) -> str:
    """Returns all settings as Markdown tables, one for each group."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings_of(*classes).values():
        groups.setdefault(setting.group, []).append(setting)
    lines: list[str] = []
    for group, settings in groups.items():
        lines += ["", f"### {group[0].upper()}{group[1:]}", ""]
        lines += ["| setting | default | values | what it does | also |", "|---|---|---|---|---|"]
        for setting in settings:
            default_text = _shown_default(setting)
            default = f"`{default_text}`" if default_text else "not set"
            also = [f"`--{alias}`" for alias in setting.aliases]
            also += [f"`{variable}`" for variable in setting.other_variables]
            if setting.short:
                also.insert(0, f"`{setting.short}`")
            cells = [f"`{setting.name}`", default, setting.kind.expected, setting.doc, ", ".join(also)]
            escaped = [cell.replace("|", "\\|") for cell in cells]  # a bar would begin another cell
            lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines[1:]) + "\n"
