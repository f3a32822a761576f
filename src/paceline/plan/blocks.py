"""Finds the repeated blocks of a model: what is wrapped, recomputed, compiled and divided into stages, one by one.

A transformer holds its layers in a list of modules of one class, a convolutional net its stages in a sequence. The
blocks are the children of the containers (`ModuleList`, `Sequential`, `ModuleDict`, and the door's `PipelineModule`)
that hold the same class several times; where blocks lie inside blocks, the outer ones count.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_CONTAINERS = ("ModuleList", "Sequential", "ModuleDict", "PipelineModule")


def repeated_blocks(model: Any) -> tuple[str, ...]:
    """Names (FQNs) of the repeated blocks, in order of definition; empty where nothing repeats."""
    found: list[str] = []
    _search(model, "", found)
    return tuple(found)


def _search(module: Any, prefix: str, found: list[str]) -> None:
    children = dict(module.named_children())
    repeated: set[str] = set()
    if type(module).__name__ in _CONTAINERS:
        counts = Counter(type(child) for child in children.values())
        repeated = {
            name
            for name, child in children.items()
            if counts[type(child)] > 1 and any(True for _ in child.children()) and _trains_or_holds(child)
        }
    for name, child in children.items():
        path = f"{prefix}.{name}" if prefix else name
        if name in repeated:
            found.append(path)
        else:
            _search(child, path, found)


def _trains_or_holds(module: Any) -> bool:
    return any(True for _ in module.parameters())
