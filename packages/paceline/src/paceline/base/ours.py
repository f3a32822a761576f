"""Tells the code of Paceline from that of users and of other libraries."""

from __future__ import annotations

import os
from functools import cache
from importlib.machinery import PathFinder

from paceline.base.parts import PACKAGES


def is_our_module(name: str) -> bool:
    """Returns whether a module, named with its packages, belongs to Paceline or one of its parts."""
    return name.partition(".")[0] in PACKAGES


@cache
def our_folders() -> tuple[str, ...]:
    """Returns the folders of our packages that are installed, each with a separator at its end."""
    folders = []
    for package in PACKAGES:
        spec = PathFinder.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(os.path.dirname(spec.origin) + os.sep)
    return tuple(folders)
