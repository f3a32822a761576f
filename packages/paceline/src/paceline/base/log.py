"""Gives each package its logger, `paceline.<package>`, and logs a warning only once. Nothing is configured at import."""

from __future__ import annotations

import logging

from paceline.base import env
from paceline.base.wording import worded

_said: set[tuple[str, str]] = set()


def logger(package: str) -> logging.Logger:
    """Returns the logger of one package of Paceline."""
    return logging.getLogger(f"paceline.{package}")


def warn_once(package: str, message: str) -> None:
    """Logs a warning once, and on rank 0 only; the other ranks log it at the level DEBUG.

    Use it for what every rank finds in the same way. The message of every warning says what to do.
    """
    if (package, message) not in _said:
        _said.add((package, message))
        logger(package).log(logging.DEBUG if env.rank_hint() else logging.WARNING, worded(message))


def info(package: str, message: str) -> None:
    """Logs what every rank finds in the same way: at the level INFO on rank 0, and DEBUG on the other ranks."""
    logger(package).log(logging.DEBUG if env.rank_hint() else logging.INFO, message)


def forget_warnings() -> None:
    """Lets every warning be logged again, for tests."""
    _said.clear()
