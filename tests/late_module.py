"""A large library that few files of tests need: loaded when their tests begin, and not by each worker that reads all files.

bitsandbytes loads torch's compiler: a fifth of the time that a worker reads files for, and more pages for each fork to copy.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class LateModule:
    """Stands for a module, which `load` imports. A file of tests without the library is skipped."""

    def __init__(self, name: str) -> None:
        # Of the first package alone: to look for a module inside would import what is around it.
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def load(self) -> Any:
        return importlib.import_module(self._name)

    def __getattr__(self, attribute: str) -> Any:
        # pytest looks for attributes of its own (`_mock_name`) on everything in a file that it reads.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self.load(), attribute)
