"""Limits the size of a config, so that a small file cannot cost minutes or gigabytes.

With eight levels of YAML anchors, 200 bytes of text stand for 10^8 values. So the values are counted as if all aliases
were expanded, and they are counted before any other code walks over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError

# The longest config in the examples of the libraries that we read configs of has 200 keys and 8 kB.
MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 100


def read_text(path: Path, name: str) -> str:
    """Reads the text of a config file.

    Args:
        path: the file.
        name: the file as the user wrote it, for the error.

    Raises:
        ConfigError: `config-size`.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    # The size is not taken from the file system: for a pipe or a device, such as /dev/zero, that would be 0.
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _too_large(name, f"it has more than {MAX_BYTES:,} bytes, which is the limit")
    # "utf-8-sig" also accepts the byte order mark that some editors write.
    return content.decode("utf-8-sig")


def compose(text: str, name: str) -> Any:
    """Parses a text as YAML, and returns its root node; None for an empty text.

    Args:
        text: the YAML text.
        name: what the text is, for the error.

    Raises:
        ConfigError: `config-size`.
        yaml.YAMLError: the text is not YAML. PyYAML raises ValueError and OverflowError for some texts instead.
    """
    import yaml

    # libyaml is ten times faster, but it composes nodes by recursion in C, where deep nesting crashes the process. It gives
    # events one by one without recursion, so the depth is counted by events first.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = values = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        values += isinstance(event, yaml.NodeEvent)
        check(values, depth, name)
    root = yaml.compose(text, Loader=loader)
    if root is not None:
        _check_aliases(root, name)
    return root


def _check_aliases(root: Any, name: str) -> None:
    """Counts the values of a YAML graph as if each alias were written out.

    A node that several aliases name is visited once and its size remembered, so the count itself stays fast.
    """
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size_of(node: Any, depth: int) -> int:
        if isinstance(node.value, str):
            return 1
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in under_way:
            raise _too_large(name, "an alias in it stands for a block that contains the alias itself")
        check(0, depth, name)
        under_way.add(id(node))
        total = 1
        # The items of a mapping are pairs of nodes, those of a list are single nodes.
        for item in node.value:
            for child in item if isinstance(item, tuple) else (item,):
                total += size_of(child, depth + 1)
        under_way.discard(id(node))
        sizes[id(node)] = total
        return total

    check(size_of(root, 1), 0, name)


def check(values: int, depth: int, name: str) -> None:
    """Refuses a config by the number of its values, or by the depth of its blocks and lists: ConfigError `config-size`."""
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
