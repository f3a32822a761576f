"""Prints lines of Paceline itself, between those of the user's script."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Prints a line on standard error that stays there."""
    print(f"paceline: {line}", file=sys.stderr, flush=True)
