"""What the processes of a job would each import for themselves, imported once before they are forked."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from paceline.base.lazy import uncollected

# A script for DeepSpeed makes an engine and an optimizer; torch loads its compiler's front (0.8 s) with the first of those.
_BY_LIBRARY = {"deepspeed": ("torch._dynamo", "paceline.compat.deepspeed.initialize")}


def warm(libraries: Iterable[str]) -> None:
    """Imports torch, and what scripts for these libraries are sure to need."""
    with uncollected():
        importlib.import_module("torch")
        for library in libraries:
            for name in _BY_LIBRARY.get(library, ()):  # rooms above this one: looked up, not imported
                importlib.import_module(name)
