"""Finds the implementations of an extension point, such as all strategies or all launchers.

Each is an entry point of an installed distribution. Those of Paceline itself are listed in the `pyproject.toml` of the part
that has them, and another distribution lists its own in the same way: there is no other door for ours.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from paceline.base.errors import ConfigError
from paceline.base.parts import extra_with, missing


class Point(NamedTuple):
    """An entry point. Python's own class is in `importlib.metadata`, whose import takes as long as `paceline --help`.

    Attributes:
        module: name of a module.
        attribute: name of an object in it; "" for the module itself.
    """

    module: str
    attribute: str

    def load(self) -> Any:
        """Imports the module, and returns the object."""
        loaded = import_module(self.module)
        return getattr(loaded, self.attribute) if self.attribute else loaded


class Registry:
    """Finds the implementations of one extension point by name.

    Args:
        group: the group of entry points, such as `paceline.strategies`.
        kind: what one of them is called in an error, such as "strategy".
        nicknames: what people also call an implementation -> its name, for the error about a name that there is not.
    """

    def __init__(self, group: str, kind: str, *, nicknames: Mapping[str, str] | None = None) -> None:
        self.group = group
        self.kind = kind
        self.nicknames = nicknames or {}
        self._added: dict[str, Any] = {}

    def add(self, name: str, implementation: Any) -> None:
        """Adds an implementation by hand, for tests and for a user's own class."""
        self._added[name] = implementation

    def remove(self, name: str) -> None:
        """Removes an implementation that `add` has added."""
        self._added.pop(name, None)

    def names(self) -> list[str]:
        """Returns the sorted names of all implementations. It imports none of them."""
        return sorted({*points(self.group), *self._added})

    def module(self, name: str) -> str:
        """Returns the name of the module of an implementation, without importing it."""
        return points(self.group)[name].module

    def get(self, name: str) -> Any:
        """Returns the implementation called `name`, and imports it.

        Raises:
            ConfigError: `unknown-name`; the message lists the names that exist. `part-missing`, for a name of a part of
                Paceline that is not installed.
        """
        if name in self._added:
            return self._added[name]
        point = points(self.group).get(name)
        if point is not None:
            return point.load()
        meant = self.nicknames.get(name.lower(), name)
        extra = extra_with(self.group, meant)
        if extra and meant not in self.names():
            raise missing(extra, f"the {self.kind} {meant} is", f"installed: {', '.join(self.names()) or 'none'}")
        fix = "use one of these names"
        close = difflib.get_close_matches(name.lower(), [*self.names(), *self.nicknames], n=1)
        beginning = [known for known in self.names() if len(name) > 1 and known.startswith(name.lower())]
        if close or beginning:
            meant = (close or beginning)[0]
            fix = f"write {self.nicknames.get(meant, meant)}"
        raise ConfigError(
            "unknown-name",
            f"there is no {self.kind} called {name!r}.",
            why=f"known: {', '.join(self.names())}",
            fix=fix,
        )

    def __iter__(self) -> Iterator[Any]:
        return (self.get(name) for name in self.names())


def points(group: str) -> dict[str, Point]:
    """Returns the entry points of a group by name. Where two distributions have a name, the first on `sys.path` counts."""
    return _all_points().get(group, {})


@cache
def _all_points() -> dict[str, dict[str, Point]]:
    """Returns the entry points of all groups that extend Paceline."""
    # `importlib.metadata.entry_points` reads the metadata of all distributions, which takes 30 ms at every start. Few
    # distributions extend Paceline, and to look for them takes 3 ms.
    found: dict[str, dict[str, Point]] = {}
    for folder in filter(os.path.isdir, sys.path):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.name.endswith((".dist-info", ".egg-info")):
                continue
            try:
                with open(os.path.join(entry.path, "entry_points.txt"), encoding="utf-8") as file:
                    text = file.read()
            except OSError:  # most have no such file
                continue
            if "[paceline." in text:
                _add_points(text, found)
    return found


def _add_points(text: str, found: dict[str, dict[str, Point]]) -> None:
    """Adds what an `entry_points.txt` lists: sections of groups with lines `name = module:attribute`."""
    group = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            group = line.strip("[]")
            continue
        name, equals, value = line.partition("=")
        if equals and group.startswith("paceline."):
            module, _, attribute = value.strip().partition(":")
            found.setdefault(group, {}).setdefault(name.strip(), Point(module, attribute))
