"""The libraries whose names Paceline serves to scripts: entry points of `paceline.libraries`, each a package of a part."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.errors import CompatError, Problem
from paceline.base.parts import extra_with, how_to_install
from paceline.base.registry import Registry

LIBRARIES = Registry("paceline.libraries", "library")
_SERVERS = Registry("paceline.name_servers", "server of names")


def install(names: Iterable[str]) -> None:
    """Serves the modules of libraries from now on; a second call for the same library does nothing.

    Args:
        names: of libraries, each an entry point of `paceline.libraries`.

    Raises:
        CompatError: `compat-library`, for an unknown one; `compat-imported`, where the real one is imported already.
    """
    names = list(dict.fromkeys(names))
    problems: list[Problem] = []
    for name in names:
        if name not in LIBRARIES.names():
            problems.append(unknown_library(name, f"Paceline cannot stand in for {name!r}."))
    if problems:
        raise CompatError.of(problems)
    _SERVERS.get("doors").install(names)


def unknown_library(name: str, what: str) -> Problem:
    """Returns the problem with a library whose names no installed part serves."""
    fix = "use one of these"
    extra = extra_with(LIBRARIES.group, name)
    if extra:
        fix = how_to_install(extra)
    return Problem(
        "compat-library", what, f"libraries whose names it serves: {', '.join(LIBRARIES.names()) or 'none'}", fix
    )
