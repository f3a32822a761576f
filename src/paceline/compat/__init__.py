"""Scripts written for another library run unchanged: its names are served by Paceline, and it need not be installed.

    install(["accelerate"])                 before the script imports it; `paceline launch --compat accelerate` does so
    python -m paceline.compat script.py     the same for one process

A name that is not carried can be imported all the same; using it raises `CompatError` and names the native way.

All that concerns one library lies in `compat/LIBRARY/`, and the core finds it there by registries:

    DIALECT              its flags, variables and config files    paceline.config.dialects
    SCRIPT_LIBRARY       what its scripts expect of a launcher    paceline.launch.script_libraries
    SCRIPT_CONFIGS       configs that its scripts bring           paceline.planner.script_config
    CHECKPOINT_FORMAT    folders that it has written              paceline.checkpoint.format.checkpoint_format

Every command imports this package and the dialects, so none of them imports torch, or what serves the names.

What a library's package may use of the core, by public names alone (`tests/shape/test_doors.py`):

    Accelerator                  subclassed, or owned by an engine; also its run, and what that has prepared
    config                       Given, ConfigDialect, resolve_run: words of the library become settings with their places
    checkpoint                   stores, files of weights, formats: what `save_state` and `load_state` are made of
    data, optim, precision       prepared loaders, optimizers and schedulers; the scaler; Lamb, Lion
    parallel                     stages and micro-batches of a pipeline; parts of divided parameters
    observe                      profiles and trackers
    world                        World, collectives, rendezvous; whole values of divided tensors
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import CompatError, Problem
from paceline.compat.names import FOR_CHILDREN

LIBRARIES = ("accelerate", "deepspeed")


def install(names: Iterable[str]) -> None:
    """Serves the modules of libraries from now on; a second call for the same library does nothing.

    Args:
        names: of libraries; "accelerate" and "deepspeed" are known.

    Raises:
        CompatError: `compat-library`, for an unknown one; `compat-imported`, where the real one is imported already.
    """
    from paceline.compat import neighbours
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
    # Asked before it is served here: afterwards the door is always there.
    had_accelerate = "accelerate" in new_names and PathFinder.find_spec("accelerate") is not None
    for name in new_names:
        sys.meta_path.insert(0, Server(name, importlib.import_module(f"{__name__}.{name}")))
        _serve_children(name)
    if "accelerate" in new_names:
        neighbours.install(found_before=had_accelerate)
    # Also where a warm process has served it already, before it knew what the launcher was told.
    if "accelerate" in names:
        importlib.import_module("paceline.compat.accelerate.launcher_variables").export_settings()


def _serve_children(name: str) -> None:
    """Lets processes that this one starts find the library too: spawned workers import the script, and so the library."""
    if _children_find(name):
        return
    folder = str(FOR_CHILDREN / name)
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
    ours = FOR_CHILDREN / name / name / "__init__.py"
    return Path(spec.origin).is_file() and Path(spec.origin).read_bytes() == ours.read_bytes()


def _is_served(name: str) -> bool:
    return any(getattr(finder, "library", None) == name for finder in sys.meta_path)


def _problem(name: str) -> Problem | None:
    if name not in LIBRARIES:
        return Problem(
            "compat-library",
            f"Paceline cannot stand in for {name!r}.",
            why=f"libraries whose names it serves: {', '.join(LIBRARIES)}",
            fix="use one of these",
        )
    if name in sys.modules:
        return Problem(
            "compat-imported",
            f"{name} is imported already, so its names cannot be served.",
            why=f"it was loaded from {getattr(sys.modules[name], '__file__', None)}",
            fix="call `paceline.compat.install` before anything imports it, or use `paceline launch --compat "
            f"{name} script.py`",
        )
    return None
