"""Reads config files: ours (flat keys, the names of the settings) and those of other libraries, YAML or JSON, as they are.

The file is read as YAML nodes, not as values: a node knows its line, and its text (`no`, `0,1`, `1e-3`) is read by the
same rules as a flag's. All problems of a file are found at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from paceline.base.errors import ConfigError, Problem, short_repr
from paceline.config import limits, options
from paceline.config.dialects import Translation, dialects, judged, known_by_a_dialect
from paceline.config.given import Choice, Given, nearest
from paceline.config.settings import TOTAL, own_name, settings_of


@dataclass
class Content:
    """What a file says.

    Attributes:
        given: the settings in it, still unread.
        unused: keys that have no effect here, each with the reason.
        problems: all that is wrong with its keys; values are checked when sources are merged.
    """

    given: list[Given] = field(default_factory=list)
    unused: list[Choice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read(path: str) -> Content:
    """Reads a config file.

    Args:
        path: the file, as the user wrote it; it stands so in each `where`.

    Raises:
        ConfigError: `config-file` where it cannot be opened, `config-syntax` where it is no YAML (or JSON), `config-size`.
    """
    root = _parse(path, _text(path))
    content = Content()
    if root is not None:
        together = _read_together(path, root)
        _read_block(path, root, "", content, together.consumed)
        content.given += together.given
        content.unused += together.unused
        content.problems += together.problems
    return content


def _text(path: str) -> str:
    try:
        text = limits.read_text(Path(path).expanduser(), f"the config file {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        fix = "`paceline config --output FILE` writes one; or name another with --config"
        raise ConfigError("config-file", f"the config file {path} cannot be read.", reason, fix) from None
    # YAML takes no tabs between tokens, JSON does.
    return text.expandtabs() if path.endswith(".json") else text


def _parse(path: str, text: str) -> yaml.MappingNode | None:
    try:
        root = limits.compose(text, f"the config file {path}")
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two leak out of PyYAML
        mark = getattr(error, "problem_mark", None)
        if getattr(error, "context", None) == "while scanning a simple key":
            # The parser notices only on the next line that a key has no colon.
            mark = getattr(error, "context_mark", mark)
        where = f"{path}:{mark.line + 1}" if mark else path
        what = getattr(error, "problem", None) or str(error).split("\n")[0]
        fix = "write one `key: value` on each line, with spaces and no tabs"
        raise ConfigError("config-syntax", f"{where} is not YAML.", what, fix) from None
    if root is None or isinstance(root, yaml.MappingNode):
        return root
    where, fix = f"{path}:{root.start_mark.line + 1}", "write one `key: value` on each line"
    raise ConfigError("config-syntax", f"{where} holds no settings.", f"it holds a {_kind(root)}", fix)


def _read_together(path: str, root: yaml.MappingNode) -> Translation:
    """What dialects read of several keys at once."""
    translation = Translation()
    for dialect in dialects():
        keys = {}
        for key, node in root.value:
            if isinstance(key, yaml.ScalarNode) and key.value in dialect.together:
                keys[key.value] = _given(path, key, node)
                if isinstance(node, yaml.MappingNode):
                    block = [_given(path, *pair) for pair in node.value]
                    keys[key.value] = replace(keys[key.value], value=block)
        translation.add(dialect.from_file(keys))
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
    first: dict[str, str] = {}
    for key, node in block.value:
        where = f"{path}:{key.start_mark.line + 1}"
        written = str(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
        name = written if written.startswith(prefix) else prefix + written
        same = own_name(name) or name  # a setting may have several names
        if same in first:
            what = f"{where} sets {same} a second time."
            content.problems.append(Problem("config-twice", what, f"first: {first[same]}", "keep one of the two"))
            continue
        first[same] = where
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
        content.problems.append(_unknown(name, where, on_command_line=own is not None))


def _read_setting(name: str, node: yaml.Node, where: str, content: Content) -> None:
    # -1 stands in files for "the flag will say it".
    if options.is_null(node) or (name == TOTAL and node.value == "-1"):
        return
    if isinstance(node, yaml.ScalarNode):
        content.given.append(Given(name, node.value, "file", where))
    elif isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        joined = ",".join(item.value for item in node.value)
        content.given.append(Given(name, joined, "file", where))
    else:
        expected = settings_of()[own_name(name)].kind.expected
        why, fix = f"it comes from {where}; expected: {expected}", f"write `{name}: VALUE` on one line"
        content.problems.append(Problem("config-value", f"{name} cannot be a {_kind(node)}.", why, fix))


def _unknown(name: str, where: str, *, on_command_line: bool) -> Problem:
    if on_command_line:
        what, fix = f"{where}: {name} cannot stand in a file.", f"say {settings_of()[own_name(name)].flag}"
        return Problem("config-key", what, "it is about one launch", fix)
    own = [setting.name for setting in settings_of().values() if setting.in_file]
    others = [TOTAL]
    for dialect in dialects():
        others += [*dialect.aliases, *dialect.names()]
    close = nearest(name, own) or nearest(name, others)
    fix = f"write {close!r}" if close else "`paceline explain` lists all settings"
    return Problem("config-key", f"{where}: there is no setting {short_repr(name)}.", "", fix)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "block of keys"
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"
