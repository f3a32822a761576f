"""A large library that few files of tests need: loaded when their tests begin, and not by each worker that reads all files.

bitsandbytes loads torch's compiler: a fifth of the time that a worker reads files for, and more pages for each fork to copy.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class LateModule:
    """Stands for a module, which `load` imports. A file of tests without the library is skipped.

    With `optional` it is not: its tests that need the library skip themselves.
    """

    def __init__(self, name: str, *, optional: bool = False) -> None:
        # Of the first package alone: to look for a module inside would import what is around it.
        self._there = find_spec(name.partition(".")[0]) is not None
        if not self._there and not optional:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def load(self) -> Any:
        return importlib.import_module(self._name) if self._there else None

    def __getattr__(self, attribute: str) -> Any:
        # pytest looks for attributes of its own (`_mock_name`) on everything in a file that it reads.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self.load(), attribute)
