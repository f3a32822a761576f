"""Saves that end as a kill would end them, for the tests of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint import Checkpointer


class Killed(BaseException):
    """Ends a save as a kill would: nothing of Paceline's may run after it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a function raise `Killed`, and keeps the clean-up that a killed process would not do from running."""

    def arm(owner: Any, name: str, call: int = 1) -> None:
        original, calls = getattr(owner, name), []

        def dying(*args: Any, **keywords: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                raise Killed
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, dying)
        monkeypatch.setattr(Checkpointer, "_discard", lambda *_: None)

    return arm
