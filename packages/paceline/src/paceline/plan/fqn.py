"""Fully qualified names (FQNs) of modules and parameters, such as `blocks.0.attn`. The FQN of a model itself is ""."""

from __future__ import annotations

from collections.abc import Container, Iterable


def parent(name: str) -> str:
    """Returns the FQN of the module that holds this one."""
    return name.rpartition(".")[0]


def joined(module: str, name: str) -> str:
    """Returns the FQN of something that a module has under this name."""
    if not module:
        return name
    return f"{module}.{name}"


def inside(name: str, module: str) -> bool:
    """Returns whether something lies inside a module."""
    return not module or name.startswith(f"{module}.")


def within(name: str, module: str) -> bool:
    """Returns whether a FQN is that of a module, or of something inside it."""
    return name == module or inside(name, module)


def within_some(name: str, modules: Iterable[str]) -> bool:
    """Returns whether a FQN is that of one of these modules, or of something inside one."""
    return any(within(name, module) for module in modules)


def nearest(name: str, modules: Container[str]) -> str | None:
    """Returns the longest of these FQNs of modules that a FQN is within; None if it is within none of them."""
    while name not in modules:
        if not name:
            return None
        name = parent(name)
    return name


def listed(names: Iterable[str], count: int = 3) -> str:
    """Returns the first names of several as text, such as "a, b, c, ..."."""
    all_names = list(names)
    ending = ["..."] if len(all_names) > count else []
    return ", ".join([*all_names[:count], *ending])
