"""Fully qualified names of modules and parameters (FQNs), such as `blocks.0.attn`; that of a model itself is ""."""

from __future__ import annotations

from collections.abc import Iterable


def parent(name: str) -> str:
    """FQN of the module that holds this one."""
    return name.rpartition(".")[0]


def inside(name: str, module: str) -> bool:
    """Whether a FQN is that of something inside a module."""
    return not module or name.startswith(f"{module}.")


def within(name: str, module: str) -> bool:
    """Whether a FQN is that of a module, or of something inside it."""
    return name == module or inside(name, module)


def within_some(name: str, modules: Iterable[str]) -> bool:
    """Whether a FQN is that of one of these modules, or of something inside one."""
    return any(within(name, module) for module in modules)
