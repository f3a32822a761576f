"""Public names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that loads each name of `where` from the module given for it, once."""

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            value = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no collection runs: imports only add objects, and looking through them takes a fifth of torch's import."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
