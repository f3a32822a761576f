"""A fixture that serves the names of another library for the length of a test; `conftest.py` of a folder imports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from paceline.compat import install
from paceline_doors.served import Server


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives a function that serves a library's names for the length of a test."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda library: install([library])
    for server in sys.meta_path:
        if isinstance(server, Server) and server not in finders:
            for served, module in server.renamed.items():
                served.__module__ = module
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("accelerate", "deepspeed"):
            del sys.modules[name]
