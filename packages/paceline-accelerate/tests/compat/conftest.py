"""What tests of several files need: a process that holds nothing of an earlier test, and one that serves a library's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_names import serve  # noqa: F401  (fixture)

from paceline.base.log import forget_warnings
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.state import AcceleratorState


@pytest.fixture
def fresh_states() -> Iterator[None]:
    """Views of accelerators do not outlive a test, and each test sees the warnings that are said once a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    forget_warnings()
