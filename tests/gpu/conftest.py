"""Skips this folder, with the list of what is missing, where there is no accelerator that computes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def missing() -> list[str]:
    """What this machine lacks for these tests; empty where they can run."""
    lacks = []
    if torch.accelerator.current_accelerator() is None:
        lacks.append(f"a build of torch for an accelerator (this one is {torch.__version__})")
    elif not torch.accelerator.is_available():
        lacks.append(f"an accelerator that torch can use (it is built for {torch.accelerator.current_accelerator()})")
    return lacks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacks = missing()
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if lacks and str(item.path).startswith(folder):
            item.add_marker(pytest.mark.skip(reason="missing: " + "; ".join(lacks)))


@pytest.fixture
def device() -> torch.device:
    """The accelerator, whatever its make."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found
