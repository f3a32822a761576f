"""Saves that end as a kill would end them, for the tests of stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.checkpoint import checkpointer
from paceline.checkpoint.store import claim, local


class Killed(BaseException):
    """Ends a save as a kill would: nothing of Paceline's may run after it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a function raise `Killed`, and keeps the clean-up that a killed process would not do from running.

    Afterwards the test is another process, also once it has undone its own patches.
    """
    process_name = claim.process_name

    def arm(owner: Any, name: str, call: int = 1) -> None:
        original, calls = getattr(owner, name), []

        def dying(*args: Any, **keywords: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                claims.setattr(claim, "process_name", lambda pid: f"{process_name(pid)}0")
                # A folder without a claim is left alone for a minute, since its claim may just be written.
                claims.setattr(local, "_GAP_S", 0.0)
                raise Killed
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, dying)
        monkeypatch.setattr(checkpointer, "discard", lambda *_: None)

    with pytest.MonkeyPatch.context() as claims:
        yield arm
