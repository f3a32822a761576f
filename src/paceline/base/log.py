"""Logging: `logging.getLogger("paceline.<package>")`, nothing configured at import, warnings said once."""

from __future__ import annotations

import logging

_said: set[tuple[str, str]] = set()


def logger(package: str) -> logging.Logger:
    """Logger of one package of Paceline."""
    return logging.getLogger(f"paceline.{package}")


def warn_once(package: str, message: str) -> None:
    """Logs a warning the first time that this process sees it; every warning names what to do."""
    if (package, message) not in _said:
        _said.add((package, message))
        logger(package).warning(message)


def forget_warnings() -> None:
    """Lets every warning be said again; for tests."""
    _said.clear()
