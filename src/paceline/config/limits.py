"""Bounds of what a config may hold, so that a small file cannot cost minutes or gigabytes.

Eight levels of YAML anchors are 200 bytes of text and 10^8 values. So values are counted as they are after aliases are
expanded, and before anything walks over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError

# The longest config in the examples of the libraries that we read configs of has 200 keys and 8 kB.
MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 100


def read_text(path: Path, name: str) -> str:
    """The text of a config file.

    Args:
        path: the file.
        name: the file as the user wrote it, for the error.

    Raises:
        ConfigError: `config-size`. OSError and UnicodeDecodeError as they come.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _too_large(name, f"it has more than {MAX_BYTES:,} bytes, which is the limit")
    return content.decode("utf-8-sig")


def compose(text: str, name: str) -> Any:
    """The YAML node of a text; None for an empty one.

    Args:
        text: YAML.
        name: where it stands, for the error.

    Raises:
        ConfigError: `config-size`. yaml.YAMLError, ValueError and OverflowError for what is no YAML.
    """
    import yaml

    # libyaml is ten times faster, but composes by recursion in C, where deep nesting ends the process: so events, which
    # it gives one by one, are counted first.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = values = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        values += isinstance(event, yaml.NodeEvent)
        _check(values, depth, name)
    root = yaml.compose(text, Loader=loader)
    if root is not None:
        _check_aliases(root, name)
    return root


def _check_aliases(root: Any, name: str) -> None:
    """Counts the values of a YAML graph as if each alias were written out; a node that several aliases name is visited once."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size_of(node: Any, depth: int) -> int:
        if isinstance(node.value, str):
            return 1
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in under_way:
            raise _too_large(name, "an alias in it stands for a block that contains the alias itself")
        _check(0, depth, name)
        under_way.add(id(node))
        total = 1
        for item in node.value:
            for child in item if isinstance(item, tuple) else (item,):
                total += size_of(child, depth + 1)
        under_way.discard(id(node))
        sizes[id(node)] = total
        return total

    _check(size_of(root, 1), 0, name)


def check_size(value: object, name: str) -> None:
    """Refuses nested mappings and lists that hold more than a config does, or themselves.

    Raises:
        ConfigError: `config-size`.
    """
    values = 0
    pending = [(value, 1)]
    while pending:
        current, depth = pending.pop()
        values += 1
        _check(values, depth if isinstance(current, Mapping | list | tuple) else 0, name)
        if isinstance(current, Mapping):
            # Of what is too much anyway, no more than the limit is looked at.
            _check(values + 2 * len(current), 0, name)
            values += len(current)
            pending += [(child, depth + 1) for child in current.values()]
        elif isinstance(current, list | tuple):
            _check(values + len(current), 0, name)
            pending += [(child, depth + 1) for child in current]


def _check(values: int, depth: int, name: str) -> None:
    if values > MAX_VALUES:
        raise _too_large(name, f"it holds more than {MAX_VALUES:,} keys and values (aliases written out)")
    if depth > MAX_DEPTH:
        raise _too_large(name, f"its blocks and lists are nested more than {MAX_DEPTH} deep")


def _too_large(name: str, why: str) -> ConfigError:
    return ConfigError(
        "config-size",
        f"{name} is too large for a config.",
        why=why,
        fix="keep settings in this file, and data in a file of its own",
    )
