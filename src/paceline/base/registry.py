"""Finds the implementations of an extension point, such as all strategies or all launchers.

Each implementation is a file in a package, or an entry point of another distribution. To add a strategy, a launcher, a
tracker or a store, one adds a file; there is no list to edit.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from paceline.base.errors import ConfigError


class Registry:
    """Finds the implementations of one extension point by name.

    Args:
        package: package whose modules are searched, including the packages inside it, such as `paceline.parallel`.
        attribute: name that a module must define to count as an implementation, such as `STRATEGY`.
        entry_points: group of entry points under which other distributions offer theirs, such as `paceline.strategies`.
        libraries: a package with one package for each foreign library, such as `paceline.compat`. Its packages are
            searched too, and an implementation in one of them has the name of that package.
        nicknames: what people also call an implementation -> its name, for the error about a name that there is not.
    """

    def __init__(
        self,
        package: str,
        attribute: str,
        entry_points: str,
        *,
        libraries: str = "",
        nicknames: Mapping[str, str] | None = None,
    ) -> None:
        self.package = package
        self.attribute = attribute
        self.entry_points = entry_points
        self.libraries = libraries
        self.nicknames = nicknames or {}
        self._added: dict[str, Any] = {}

    def add(self, name: str, implementation: Any) -> None:
        """Adds an implementation by hand, for tests and for a user's own class."""
        self._added[name] = implementation

    def remove(self, name: str) -> None:
        """Removes an implementation that `add` has added."""
        self._added.pop(name, None)

    def own_names(self) -> list[str]:
        """Returns the sorted names of the implementations that come with Paceline, without a search for entry points."""
        return sorted(self._modules())

    def names(self) -> list[str]:
        """Returns the sorted names of all implementations."""
        return sorted({*self._modules(), *_points(self.entry_points), *self._added})

    def get(self, name: str) -> Any:
        """Returns the implementation called `name`, and imports it.

        Raises:
            ConfigError: `unknown-name`; the message lists the names that exist.
        """
        if name in self._added:
            return self._added[name]
        module = self._modules().get(name)
        if module is not None:
            return getattr(importlib.import_module(module), self.attribute)
        point = _points(self.entry_points).get(name)
        if point is not None:
            return point.load()
        fix = "use one of these names"
        close = difflib.get_close_matches(name.lower(), [*self.names(), *self.nicknames], n=1)
        beginning = [known for known in self.names() if len(name) > 1 and known.startswith(name.lower())]
        if close or beginning:
            meant = (close or beginning)[0]
            fix = f"write {self.nicknames.get(meant, meant)}"
        raise ConfigError(
            "unknown-name",
            f"there is no {self.attribute.lower()} called {name!r}.",
            why=f"known: {', '.join(self.names())}",
            fix=fix,
        )

    def __iter__(self) -> Iterator[Any]:
        return (self.get(name) for name in self.names())

    def _modules(self) -> dict[str, str]:
        return _modules(self.package, self.attribute, self.libraries)


@cache
def _modules(package: str, attribute: str, libraries: str = "") -> dict[str, str]:
    """Returns implementation name -> name of the module that defines it, without importing these modules."""
    # An implementation may need torch or an optional library, and its name must be known without them. So the text of each
    # file is searched for a line that assigns the attribute.
    definition = re.compile(rf"^{attribute} ?[=:]".encode(), re.MULTILINE)
    modules = _defining(package, importlib.import_module(package).__path__, definition, attribute.encode())
    if libraries:
        for info in pkgutil.iter_modules(importlib.import_module(libraries).__path__):
            in_package = _modules(f"{libraries}.{info.name}", attribute) if info.ispkg else {}
            for module in in_package.values():
                modules[info.name] = module
    return modules


def _defining(package: str, folders: Iterable[str], definition: re.Pattern[bytes], attribute: bytes) -> dict[str, str]:
    """Returns the modules in a package, and in the packages inside it, whose text matches `definition`."""
    modules: dict[str, str] = {}
    for folder in folders:
        # Not pkgutil, which asks the import system about each name: every start of the launcher waits for this search.
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            stem, suffix = os.path.splitext(entry.name)
            name = f"{package}.{stem}"
            path = entry.path
            is_package = suffix == "" and os.path.isfile(f"{path}/__init__.py")
            if is_package:
                path = f"{path}/__init__.py"
            elif suffix != ".py" or stem == "__init__":
                continue
            with open(path, "rb") as file:
                text = file.read()
            # The regular expression takes twenty times as long as the search for the name, which few files have.
            if attribute in text and definition.search(text):
                modules[stem] = name
            if is_package:
                modules |= _defining(name, [entry.path], definition, attribute)
    return modules


@cache
def _points(group: str) -> dict[str, Any]:
    # Reading the metadata of all distributions takes 30 ms at every start, and nearly none of them offers an entry point of
    # this group. Searching their files for the name of the group takes 3 ms.
    if f"[{group}]".encode() not in _entry_point_files():
        return {}
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group)}


@cache
def _entry_point_files() -> bytes:
    """Returns the `entry_points.txt` of all installed distributions, one after the other."""
    texts = []
    for folder in filter(os.path.isdir, sys.path):
        for entry in os.scandir(folder):
            if entry.name.endswith((".dist-info", ".egg-info")):
                with contextlib.suppress(OSError), open(os.path.join(entry.path, "entry_points.txt"), "rb") as file:
                    texts.append(file.read())
    return b"\n".join(texts)
