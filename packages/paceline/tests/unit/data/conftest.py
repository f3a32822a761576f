"""Each test sees the warnings that are said once a process."""

import pytest

from paceline.base.log import forget_warnings


@pytest.fixture(autouse=True)
def warnings_are_said_again() -> None:
    forget_warnings()
