"""Describes Python environments into which doors are installed: where packages are, and what is installed under a name."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from os.path import relpath
from pathlib import Path

from paceline.config.libraries import LIBRARIES
from paceline_doors.door_files import INSTALLER, Door
from paceline_doors.names import folder_for_children


@dataclass(frozen=True)
class Environment:
    """The folders of one interpreter.

    Attributes:
        packages: its folder of packages (`site-packages`).
        scripts: its folder of commands.
        python: path of the interpreter.
        search: folders in which its processes search for modules, in order.
        owner: a sentence that says who else installs packages here, so that the user may not; "" otherwise.
    """

    packages: Path
    scripts: Path
    python: Path
    search: Sequence[str]
    owner: str = ""

    @classmethod
    def active(cls) -> Environment:
        """Returns the environment of this process."""
        paths = sysconfig.get_paths()
        marker = Path(paths["stdlib"], "EXTERNALLY-MANAGED")
        in_virtual_environment = sys.prefix != sys.base_prefix
        owner = ""
        if marker.is_file() and not in_virtual_environment:
            owner = f"{marker} says that the system's package manager installs packages here"
        return cls(Path(paths["purelib"]), Path(paths["scripts"]), Path(sys.executable), tuple(sys.path), owner)

    def door(self, library: str) -> Door:
        """Returns the door of a library for this environment."""
        return Door(library, self.packages, self.scripts, self.python)

    def distributions(self, name: str) -> list[Distribution]:
        """Lists what is installed under a name on the search path, except the folders for child processes of a launch."""
        # `importlib.metadata` caches the content of folders, and a door that was just installed has to be seen.
        distributions: list[Distribution] = []
        of_children = {folder_for_children(library) for library in LIBRARIES.names()}
        for entry in self.search:
            folder = Path(entry)
            if folder not in of_children:
                folders = sorted(folder.glob(f"{name}[-.]*info"))
                # An interrupted installation may have left a folder without metadata.
                distributions += [Distribution.at(path) for path in folders if _has_metadata(path)]
        return distributions

    def installed_door(self, library: str) -> Distribution | None:
        """Returns the door of a library if it is completely installed, which RECORD, its last file, shows."""
        for candidate in self.distributions(library):
            if is_door(candidate) and candidate.files:
                return candidate
        return None

    def real(self, library: str) -> Distribution | None:
        """Returns the first installed distribution of the real library; None if there is none."""
        for candidate in self.distributions(library):
            if not is_door(candidate):
                return candidate
        return None

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
    """Returns the folder of packages in which a distribution lies."""
    return Path(str(distribution.locate_file(""))).absolute()


def parts_of(distribution: Distribution) -> list[str]:
    """Lists what has to be moved away to hide a distribution: whole folders of packages, and single files.

    Returns:
        Paths relative to its folder of packages; an empty list if the distribution does not say what belongs to it.
    """
    folder = folder_of(distribution)
    parts: dict[str, None] = {}
    for file in distribution.files or []:
        # Commands lie outside of the folder, and `__pycache__` may belong to several distributions.
        is_alone = file.parts[0] in ("..", "__pycache__") or len(file.parts) == 1
        path = file.parts[0]
        if is_alone:
            path = str(file)
        if (folder / path).exists():
            parts[relpath(folder / path, folder)] = None
    return list(parts)
