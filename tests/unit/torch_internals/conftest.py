"""Process groups that these tests make end with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _groups_are_freed_here() -> Iterator[None]:
    """Frees groups that lie in cycles of references: a process forked later, which lacks their threads, would abort."""
    yield
    gc.collect()
