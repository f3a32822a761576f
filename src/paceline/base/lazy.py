"""Imports the public names of a package when they are first used (PEP 562)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`, which imports a name at its first use.

    Args:
        package: name of the package whose names are lazy.
        where: public name -> the module that defines it.
    """

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            value = getattr(import_module(where[name]), name)
        # The name is an attribute of the package from now on, so Python does not call this function for it again.
        setattr(sys.modules[package], name, value)
        return value

    return load


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns the garbage collector off inside a `with` block that imports modules.

    Imports only add objects, and scanning them again and again takes a fifth of the time of importing torch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
