"""Finds the repeated blocks of a model: what is wrapped, recomputed, compiled and divided into stages, one by one.

A transformer holds its layers in a list of modules of one class, a convolutional net its stages in a sequence. The
blocks are the children of the containers (`ModuleList`, `Sequential`, `ModuleDict`, and the door's `PipelineModule`)
that hold the same class several times; where blocks lie inside blocks, the outer ones count. A subclass that does not
change how such a container runs is one, too. A list that repeats (`layers.append(ModuleList([Attention(), FeedForward()]))`)
is called by nobody: its children are blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.plan.fqn import joined

if TYPE_CHECKING:
    import torch

_NEVER_CALLED = ("ModuleList", "ModuleDict")
_CONTAINERS = (*_NEVER_CALLED, "Sequential", "PipelineModule")


def repeated_blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Names (FQNs) of the repeated blocks, in order of definition; empty where nothing repeats."""
    blocks: list[str] = []
    _search(model, "", blocks)
    return tuple(blocks)


def _search(module: torch.nn.Module, prefix: str, blocks: list[str], repeats: bool = False) -> None:
    """Adds the blocks inside of a module; `repeats`: it is a list of which its own container has several."""
    counts = Counter(type(child) for child in module.children())
    in_container = _container(module) is not None
    for name, child in module.named_children():
        path = joined(prefix, name)
        # Layers such as a lone ReLU repeat too, and are no blocks: a block has children, and parameters in them.
        has_children = next(child.children(), None) is not None
        has_parameters = next(child.parameters(), None) is not None
        is_repeated = in_container and (repeats or counts[type(child)] > 1)
        is_called = _container(child) not in _NEVER_CALLED
        if is_repeated and is_called and has_children and has_parameters:
            blocks.append(path)
        else:
            _search(child, path, blocks, is_repeated and not is_called)


def is_sequence(module: torch.nn.Module) -> bool:
    """Returns whether the module runs its children one after the other and does nothing else."""
    return _container(module) == "Sequential"


def _container(module: torch.nn.Module) -> str | None:
    """Returns the container that the module is: its own class or one whose `forward` it keeps; None for any other module."""
    for cls in type(module).__mro__:
        if cls.__name__ in _CONTAINERS:
            return cls.__name__
        if "forward" in vars(cls):
            return None
    return None
