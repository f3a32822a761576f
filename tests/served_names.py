"""Fixtures for tests of the names of other libraries; `conftest.py` of a folder imports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from paceline.base.log import forget_warnings
from paceline.compat import install
from paceline_doors.served import Server


@pytest.fixture
def fresh_states() -> Iterator[None]:
    """Views of accelerators do not outlive a test, and each test sees the warnings that are said once a process."""
    yield
    from paceline_accelerate.gradient_state import GradientState
    from paceline_accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    forget_warnings()


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
