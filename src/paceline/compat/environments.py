"""Python environments into which doors are put: where their packages lie, and what is installed there under a name."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from os.path import relpath
from pathlib import Path

from paceline.compat.door_files import INSTALLER, Door
from paceline.compat.names import FOR_CHILDREN


@dataclass(frozen=True)
class Environment:
    """Where packages of one interpreter lie.

    Attributes:
        packages: its folder of packages (`site-packages`).
        scripts: its folder of commands.
        python: the interpreter.
        search: the folders that a process of it searches for modules, in order.
        owner: who alone may install packages here, where that is not the user; "" otherwise.
    """

    packages: Path
    scripts: Path
    python: Path
    search: Sequence[str]
    owner: str = ""

    @classmethod
    def active(cls) -> Environment:
        """That of this process."""
        paths = sysconfig.get_paths()
        marker = Path(paths["stdlib"], "EXTERNALLY-MANAGED")
        in_virtual_environment = sys.prefix != sys.base_prefix
        owner = ""
        if marker.is_file() and not in_virtual_environment:
            owner = f"{marker} says that the system's package manager installs packages here"
        return cls(Path(paths["purelib"]), Path(paths["scripts"]), Path(sys.executable), tuple(sys.path), owner)

    def door(self, library: str) -> Door:
        """The door of a library here."""
        return Door(library, self.packages, self.scripts, self.python)

    def distributions(self, name: str) -> list[Distribution]:
        """All that is installed under a name on the search path, without what serves children of a launch."""
        # `importlib.metadata` remembers what a folder holds, and a door that was just installed has to be seen.
        distributions: list[Distribution] = []
        for entry in self.search:
            folder = Path(entry)
            if not folder.is_relative_to(FOR_CHILDREN):
                folders = sorted(folder.glob(f"{name}[-.]*info"))
                # An empty folder may be what an interrupted installation has left.
                distributions += [Distribution.at(path) for path in folders if _has_metadata(path)]
        return distributions

    def installed_door(self, library: str) -> Distribution | None:
        """The door of a library, where it is installed to its last file, which is RECORD."""
        candidates = self.distributions(library)
        doors = [candidate for candidate in candidates if is_door(candidate) and candidate.files]
        return doors[0] if doors else None

    def real(self, library: str) -> Distribution | None:
        """The real library, where it is installed: the first one that is found."""
        others = [distribution for distribution in self.distributions(library) if not is_door(distribution)]
        return others[0] if others else None

    def contains(self, distribution: Distribution) -> bool:
        """Whether a distribution lies in the folder of packages, and not in another one of the search path."""
        return folder_of(distribution).resolve() == self.packages.resolve()

    def comes_first(self, folder: Path) -> bool:
        """Whether a folder is searched before the folder of packages."""
        folders = [Path(entry).absolute() for entry in self.search]
        if self.packages not in folders or folder not in folders:
            return folder in folders
        return folders.index(folder) < folders.index(self.packages)


def _has_metadata(folder: Path) -> bool:
    return (folder / "METADATA").is_file() or (folder / "PKG-INFO").is_file()


def is_door(distribution: Distribution) -> bool:
    """Whether a distribution was installed by `paceline doors`."""
    return (distribution.read_text("INSTALLER") or "").strip() == INSTALLER


def folder_of(distribution: Distribution) -> Path:
    """The folder of packages in which a distribution lies."""
    return Path(str(distribution.locate_file(""))).absolute()


def parts_of(distribution: Distribution) -> list[str]:
    """What has to be moved for a distribution to be gone: whole folders of packages, and single files.

    Returns:
        paths from its folder of packages; none where the distribution does not say what belongs to it.
    """
    folder = folder_of(distribution)
    parts: dict[str, None] = {}
    for file in distribution.files or []:
        # Commands lie outside of the folder, and `__pycache__` may belong to several distributions.
        is_alone = file.parts[0] in ("..", "__pycache__") or len(file.parts) == 1
        path = str(file) if is_alone else file.parts[0]
        if (folder / path).exists():
            parts[relpath(folder / path, folder)] = None
    return list(parts)
