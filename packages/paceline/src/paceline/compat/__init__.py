"""Scripts written for another library run unchanged: its names are served by Paceline, and it need not be installed.

    install(["accelerate"])                 before the script imports it; `paceline launch --compat accelerate` does so
    python -m paceline.compat script.py     the same for one process

A name that is not carried can be imported all the same; using it raises `CompatError` and names the native way.

All that concerns one library lies in a part of its own, which the core finds by entry points:

    paceline.libraries            the table of its names          `Names` in paceline.compat.names
    paceline.config_dialects      its flags, variables and files  paceline.config.dialects
    paceline.script_libraries     what scripts need at a launch   paceline.launch.script_libraries
    paceline.script_configs       configs that scripts bring      read by `paceline tune`
    paceline.checkpoint_formats   folders that it has written     paceline.checkpoint.format.checkpoint_format

Every command imports this package and the dialects, so none of them imports torch, or what serves the names.

What such a part may use of the core, by public names alone (`tests/shape/test_doors.py`):

    Accelerator                  subclassed, or owned by an engine; also its run, and what that has prepared
    config                       Given, ConfigDialect, resolve_run: words of the library become settings with their places
    checkpoint                   stores, files of weights, formats: what `save_state` and `load_state` are made of
    data, optim, precision       prepared loaders, optimizers and schedulers; the scaler; Lamb, Lion
    parallel                     stages and micro-batches of a pipeline; parts of divided parameters
    observe                      profiles and trackers
    world                        World, collectives, rendezvous; whole values of divided tensors
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import CompatError, Problem
from paceline.base.parts import extra_with, how_to_install
from paceline.compat.names import Names, folder_for_children
from paceline.config.libraries import LIBRARIES


def install(names: Iterable[str]) -> None:
    """Serves the modules of libraries from now on; a second call for the same library does nothing.

    Args:
        names: of libraries, such as "accelerate" and "deepspeed".

    Raises:
        CompatError: `compat-library`, for an unknown one; `compat-imported`, where the real one is imported already.
    """
    from paceline.compat.served import Server

    names = list(dict.fromkeys(names))
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
    if name not in LIBRARIES.names():
        return unknown_library(name, f"Paceline cannot stand in for {name!r}.")
    if name in sys.modules:
        return Problem(
            "compat-imported",
            f"{name} is imported already, so its names cannot be served.",
            why=f"it was loaded from {getattr(sys.modules[name], '__file__', None)}",
            fix="call `paceline.compat.install` before anything imports it, or use `paceline launch --compat "
            f"{name} script.py`",
        )
    return None


def unknown_library(name: str, what: str) -> Problem:
    """Returns the problem with a library whose names no installed part serves."""
    fix = "use one of these"
    extra = extra_with("paceline.libraries", name)
    if extra:
        fix = how_to_install(extra)
    return Problem(
        "compat-library", what, f"libraries whose names it serves: {', '.join(LIBRARIES.names()) or 'none'}", fix
    )
