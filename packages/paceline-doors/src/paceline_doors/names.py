"""What a package of ours says of the library whose names it serves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from paceline.config.libraries import LIBRARIES


def folder_for_children(library: str) -> Path:
    """Returns the folder with a package and metadata by which processes find a door without a call of `install`."""
    spec = find_spec(LIBRARIES.module(library))
    assert spec is not None and spec.origin is not None, "an entry point names a package that is installed"
    return Path(spec.origin).parent / "for_children"


class Names(Protocol):
    """One library's names."""

    __name__: str
    VERSION: str
    ABOUT: dict[str, object]  # what its package says of itself by names with underscores, beside `__version__`
    COMMANDS: dict[str, str]  # commands of an installed door -> what runs them
    IMPORTED_WITH: dict[str, str]  # its packages -> names of the modules that importing one imports too

    def modules(self) -> dict[str, frozenset[str]]:
        """Names of its modules, each with its public names."""

    def imports(self) -> dict[str, dict[str, str]]:
        """Maps each module to the modules of others that it imports: the name in it -> the module's full name."""

    def carried(self) -> dict[str, str]:
        """Maps each name to the "module:attribute" of ours that stands for it; a name with its module before one without."""

    def after_install(self, *, newly: bool, found_before: bool) -> None:
        """Does what follows when its names are served.

        Args:
            newly: whether this call of `install` has begun to serve them; a warm process may have done so earlier.
            found_before: whether Python found a library of this name before.
        """

    def notices(self) -> list[str]:
        """Says, for a person who installs its door, which installed libraries have not been tried with it."""

    def native_way(self, name: str) -> tuple[str, str]:
        """Returns why a name, given with its module, is not carried, and what to do instead."""


@cache
def listed(file: Path) -> dict[str, frozenset[str]]:
    """Reads the modules that a `names.txt` lists, a line each, with their public names."""
    modules = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, names = line.partition(":")
        modules[name] = frozenset(names.split())
    return modules


def targets(table: Mapping[str, str | Mapping[str, str]]) -> dict[str, str]:
    """Returns what `Names.carried` does, of a table: module of ours -> names.

    `theirs=ours` where ours is called otherwise. Names that mean this in some modules alone stand under these modules:
    {"deepspeed.comm deepspeed.comm.comm": names}.
    """
    carried = {}
    for ours, entry in table.items():
        names_by_modules = {"": entry} if isinstance(entry, str) else entry
        for modules_of_theirs, names in names_by_modules.items():
            prefixes = [f"{module}." for module in modules_of_theirs.split()] or [""]
            for pair in names.split():
                theirs, _, own = pair.partition("=")
                for prefix in prefixes:
                    carried[f"{prefix}{theirs}"] = f"{ours}:{own or theirs}"
    return carried


def first_way(name: str, ways: Iterable[tuple[str, str, str]], default: tuple[str, str]) -> tuple[str, str]:
    """Returns why a name is not carried, and what to do instead: of the first of (pattern, why, what to do) that it fits."""
    for pattern, why, fix in ways:
        if re.search(pattern, name):
            return why, fix
    return default
