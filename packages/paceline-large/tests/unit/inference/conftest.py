"""A model whose hooks know it is collected later; its reading thread ends with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects the models of a test, before the guard looks for threads that are left."""
    yield
    gc.collect()
