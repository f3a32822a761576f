"""`install` lets Python find the modules of libraries here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import CompatError, Problem
from paceline.config.libraries import LIBRARIES
from paceline_doors.names import Names, folder_for_children


def install(names: Sequence[str]) -> None:
    """Serves the modules of libraries from now on; `paceline.config.libraries.install` calls it.

    Args:
        names: of installed libraries, each once.

    Raises:
        CompatError: `compat-imported`, where the real one is imported already.
    """
    from paceline_doors.served import Server  # it reads metadata, which takes long

    new_names = [name for name in names if not _is_served(name)]
    problems: list[Problem] = []
    for name in new_names:
        problem = _problem(name)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise CompatError.of(problems)
    for name in names:
        library: Names = LIBRARIES.get(name)
        # Asked before it is served here: afterwards the door is always there.
        found_before = PathFinder.find_spec(name) is not None
        if name in new_names:
            sys.meta_path.insert(0, Server(name, library))
            _serve_children(name)
        library.after_install(newly=name in new_names, found_before=found_before)


def _serve_children(name: str) -> None:
    """Lets processes that this one starts find the library too: spawned workers import the script, and so the library."""
    if _children_find(name):
        return
    folder = str(folder_for_children(name))
    inherited = environment.snapshot().get("PYTHONPATH", "")
    others = [path for path in inherited.split(os.pathsep) if path and path != folder]
    # First, so that a real library in a later folder is not found.
    environment.export({"PYTHONPATH": os.pathsep.join([folder, *others])})
    # Workers of `multiprocessing` take over the parent's path instead. Its first entry is the script's folder.
    if folder not in sys.path:
        sys.path.insert(1, folder)


def _children_find(name: str) -> bool:
    """Whether Python finds a door by itself: one is installed here, or the launcher has put it into PYTHONPATH."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None:
        return False
    ours = folder_for_children(name) / name / "__init__.py"
    return Path(spec.origin).is_file() and Path(spec.origin).read_bytes() == ours.read_bytes()


def _is_served(name: str) -> bool:
    return any(getattr(finder, "library", None) == name for finder in sys.meta_path)


def _problem(name: str) -> Problem | None:
    if name in sys.modules:
        return Problem(
            "compat-imported",
            f"{name} is imported already, so its names cannot be served.",
            why=f"it was loaded from {getattr(sys.modules[name], '__file__', None)}",
            fix="call `paceline.compat.install` before anything imports it, or use `paceline launch --compat "
            f"{name} script.py`",
        )
    return None
