"""`accelerate.launchers`: what is no launcher in it."""

from __future__ import annotations

from paceline_accelerate.state import PartialState


def test_launch() -> None:
    """Makes a `PartialState`, which shows that processes find each other."""
    PartialState()
