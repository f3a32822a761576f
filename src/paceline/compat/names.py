"""What a package of ours says of the library whose names it serves."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

# Packages and metadata, a folder a library, by which processes find a door although nobody has called `install` in them.
FOR_CHILDREN = Path(__file__).parent / "for_children"


class Names(Protocol):
    """One library's names."""

    VERSION: str

    def modules(self) -> dict[str, frozenset[str]]:
        """Names of its modules, each with its public names."""

    def imported_with(self, package: str) -> frozenset[str]:
        """Names of the modules that importing a package imports too."""

    def imports(self) -> dict[str, dict[str, str]]:
        """Maps each module to the modules of others that it imports: the name in it -> the module's full name."""

    def carried(self) -> dict[str, str]:
        """Maps each name to the "module:attribute" of ours that stands for it; a name with its module before one without."""

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
