"""Reads config files in YAML or JSON: Paceline's own, whose keys are the names of settings, and those of other libraries.

The file is read as YAML nodes, not as values. A node knows its line, and its text (`no`, `0,1`, `1e-3`) can be parsed by
the same rules as the text of a flag. All problems of a file are found at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from paceline.base.errors import MAX_PROBLEMS, ConfigError, Problem, short_repr
from paceline.base.files import expanded
from paceline.config import limits, options
from paceline.config.dialects import Translation, dialects, judged, known_by_a_dialect
from paceline.config.given import Choice, Given, nearest
from paceline.config.settings import TOTAL, own_name, settings_of


@dataclass
class Content:
    """Holds the content of a file.

    Attributes:
        given: the settings in it, not parsed yet.
        unused: keys that have no effect here, each with the reason.
        problems: all problems with its keys; values are checked later, when the sources are merged.
        consumed: names of keys, and of flags that were read together with them.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)


def read(path: str, flags: Sequence[Given] = ()) -> Content:
    """Reads a config file.

    Args:
        path: the file, as the user wrote it; each `where` of a value names it in this form.
        flags: of the command line, some of which a dialect reads together with blocks of the file.

    Raises:
        ConfigError: `config-file` if it cannot be opened, `config-syntax` if it is not YAML (or JSON), `config-size`.
    """
    root = _parse(path, _text(path))
    content = Content()
    if root is not None:
        # Dialects read keys that have a meaning only together first; `consumed` then keeps these from being read again
        # one by one.
        together = _read_together(path, root, flags)
        _read_block(path, root, "", content, together.consumed)
        content.given += together.given
        content.unused += together.unused
        content.problems += together.problems
        content.consumed = together.consumed
    return content


def _text(path: str) -> str:
    try:
        text = limits.read_text(expanded(path), f"the config file {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        fix = "`paceline config --output FILE` writes one; or name another with --config"
        raise ConfigError("config-file", f"the config file {path} cannot be read.", reason, fix) from None
    # JSON allows tabs between tokens and YAML does not, but both are parsed as YAML.
    if path.endswith(".json"):
        return text.expandtabs()
    return text


def _parse(path: str, text: str) -> yaml.MappingNode | None:
    try:
        root = limits.compose(text, f"the config file {path}")
    except ConfigError:
        raise
    # PyYAML does not wrap every error: ValueError and OverflowError of Python's own come through.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        if getattr(error, "context", None) == "while scanning a simple key":
            # The parser notices only on the next line that a key has no colon, so its context names the right line.
            mark = getattr(error, "context_mark", mark)
        where = f"{path}:{mark.line + 1}" if mark else path
        what = getattr(error, "problem", None) or str(error).split("\n")[0]
        fix = "write one `key: value` on each line, with spaces and no tabs"
        raise ConfigError("config-syntax", f"{where} is not YAML.", what, fix) from None
    if root is None or isinstance(root, yaml.MappingNode):
        return root
    where = f"{path}:{root.start_mark.line + 1}"
    fix = "write one `key: value` on each line"
    raise ConfigError("config-syntax", f"{where} holds no settings.", f"it holds a {_kind(root)}", fix)


def _read_together(path: str, root: yaml.MappingNode, flags: Sequence[Given]) -> Translation:
    """Lets each dialect read the keys that have a meaning only together."""
    translation = Translation()
    for dialect in dialects():
        keys = {}
        for key, node in root.value:
            if isinstance(key, yaml.ScalarNode) and key.value in dialect.together:
                keys[key.value] = _given(path, key, node)
                if isinstance(node, yaml.MappingNode):
                    block = [_given(path, *pair) for pair in node.value]
                    keys[key.value] = replace(keys[key.value], value=block)
        translation.add(dialect.from_file(keys, flags))
    return translation


def _given(path: str, key: yaml.Node, node: yaml.Node) -> Given:
    name = str(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
    return Given(name, _value(node), "file", f"{path}:{key.start_mark.line + 1}")


def _value(node: yaml.Node) -> Any:
    return None if options.is_null(node) else options.value_of(node)


def _read_block(path: str, block: yaml.MappingNode, prefix: str, content: Content, consumed: Collection[str]) -> None:
    blocks: dict[str, str] = {}
    for dialect in dialects():
        blocks |= dialect.blocks
    first_places: dict[str, str] = {}
    for key, node in block.value:
        where = f"{path}:{key.start_mark.line + 1}"
        written = str(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
        # The keys of a block may be written with or without the prefix that the dialect gives to them.
        name = written if written.startswith(prefix) else prefix + written
        # A setting may have several names, and setting it under two of them is as ambiguous as repeating one.
        setting_name = own_name(name) or name
        if setting_name in first_places:
            what = f"{where} sets {setting_name} a second time."
            why = f"first: {first_places[setting_name]}"
            content.problems.append(Problem("config-twice", what, why, "keep one of the two"))
            continue
        first_places[setting_name] = where
        if name in consumed or (name in blocks and options.is_null(node)):
            continue
        if name in blocks and isinstance(node, yaml.MappingNode):
            _read_block(path, node, blocks[name], content, consumed)
        else:
            _read_key(path, name, node, where, content)


def _read_key(path: str, name: str, node: yaml.Node, where: str, content: Content) -> None:
    own = settings_of().get(own_name(name))
    if name == options.NAME:
        for option in options.read_node(node, "file", path):
            if isinstance(option, Problem):
                content.problems.append(option)
            else:
                content.given.append(option)
        return
    if own is not None and own.in_file:
        _read_setting(name, node, where, content)
        return
    value = Given(name, _value(node), "file", where)
    if known_by_a_dialect(value):
        # An empty value in a file means that the key is not set.
        if value.value is not None:
            content.given.append(value)
        return
    text = node.value if isinstance(node, yaml.ScalarNode) else f"a {_kind(node)}"
    verdict = judged(Given(name, text, "file", where))
    if isinstance(verdict, Choice):
        content.unused.append(verdict)
    elif verdict is not None:
        content.problems.append(verdict)
    else:
        keys = [str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        # Only so many problems are shown, and to find the nearest name of one takes milliseconds.
        is_shown = len(content.problems) < MAX_PROBLEMS
        content.problems.append(_unknown(name, where, keys, on_command_line=own is not None, suggests=is_shown))


def _read_setting(name: str, node: yaml.Node, where: str, content: Content) -> None:
    # In files of other launchers -1 means that the flag will give the number, so it is the same as no value.
    if options.is_null(node) or (name == TOTAL and node.value == "-1"):
        return
    if isinstance(node, yaml.ScalarNode):
        content.given.append(Given(name, node.value, "file", where))
    elif isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        joined = ",".join(item.value for item in node.value)
        content.given.append(Given(name, joined, "file", where))
    else:
        expected = settings_of()[own_name(name)].kind.expected
        why = f"it comes from {where}; expected: {expected}"
        fix = f"write `{name}: VALUE` on one line"
        content.problems.append(Problem("config-value", f"{name} cannot be a {_kind(node)}.", why, fix))


def _unknown(name: str, where: str, keys: Sequence[str], *, on_command_line: bool, suggests: bool) -> Problem:
    """Returns the problem with a key that is no setting of a file, or a block of such keys."""
    if on_command_line:
        what = f"{where}: {name} cannot stand in a file."
        fix = f"say {settings_of()[own_name(name)].flag}"
        return Problem("config-key", what, "it is about one launch", fix)
    own = [setting.name for setting in settings_of().values() if setting.in_file]
    others = [TOTAL]
    for dialect in dialects():
        others += [*dialect.aliases, *dialect.names()]
    # Paceline's own names come first: the suggestion should be a setting where both would fit.
    close = (nearest(name, own) or nearest(name, others)) if suggests else ""
    fix = f"write {close!r}" if close else "`paceline explain` lists all settings"
    if keys and all(key in own for key in keys):  # `plan: {zero: 2}`, as scripts write it
        fix = f"write what it holds without it, each at the start of a line: {', '.join(keys)}"
    return Problem("config-key", f"{where}: there is no setting {short_repr(name)}.", "", fix)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "block of keys"
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"
