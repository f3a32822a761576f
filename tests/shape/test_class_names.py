"""A class name means one thing in the whole repository: whoever searches for it finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import paceline_accelerate
import paceline_deepspeed

DOORS = (paceline_accelerate, paceline_deepspeed)


def classes_of(modules) -> dict[str, list[str]]:
    """Name of a class, without a leading `_` -> its modules.

    A private protocol is left out: it describes the part of the class with its name that a module uses.
    """
    found = defaultdict(list)
    for name, module in modules.items():
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            is_protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            if not (is_protocol and node.name.startswith("_")):
                found[node.name.lstrip("_")].append(name)
    return found


def names_of_libraries() -> set[str]:
    """Names that the libraries have whose scripts the doors serve."""
    words: set[str] = set()
    for door in DOORS:
        words |= set(Path(door.__path__[0], "names.txt").read_text(encoding="utf-8").split())
    return words


def test_a_class_name_means_one_thing(modules) -> None:
    libraries = names_of_libraries()
    doors = tuple(f"{door.__name__}." for door in DOORS)
    several = {}
    for name, places in classes_of(modules).items():
        # A door must have its library's name; beside it the name has one meaning of our own.
        own = [place for place in places if not (name in libraries and place.startswith(doors))]
        if len(own) > 1:
            several[name] = own
    assert not several
