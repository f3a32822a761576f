"""Logging: `logging.getLogger("paceline.<package>")`, nothing configured at import, warnings said once."""

from __future__ import annotations

import logging

from paceline.base import env

_said: set[tuple[str, str]] = set()


def logger(package: str) -> logging.Logger:
    """Logger of one package of Paceline."""
    return logging.getLogger(f"paceline.{package}")


def warn_once(package: str, message: str) -> None:
    """Logs a warning the first time it comes up, on rank 0 alone: for what every rank finds out alike.

    Every warning names what to do.
    """
    if (package, message) not in _said:
        _said.add((package, message))
        logger(package).log(logging.DEBUG if env.rank_hint() else logging.WARNING, message)


def forget_warnings() -> None:
    """Lets every warning be said again; for tests."""
    _said.clear()
