"""Forecasts that `paceline plan` has made, kept so that a watched run of the same script can show them beside what is measured.

A forecast belongs to one script as it was, its arguments, the number of ranks, the plan and this host. A script that has
changed since has none.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base import env as environment
from paceline.base.files import replace_text
from paceline.base.json_fields import read_file
from paceline.config.places import user_folder
from paceline.plan.plan import Plan
from paceline.planner.estimate import settings_of

_MOST = 200  # files that are kept


@dataclass(frozen=True)
class KnownForecast:
    """What was forecast: milliseconds of a step, the floating-point operations of one rank in it, and bytes at its peak.

    `peak_bytes` is 0 where the rehearsal came to no step, and in a file of an earlier version.
    """

    step_ms: float
    flops: float
    peak_bytes: int = 0


def key_of(script: str, args: Sequence[str], world_size: int, plan: Plan) -> str:
    """What a forecast is found by; "" where there is no such script."""
    try:
        path = Path(script).resolve(strict=True)
        changed = path.stat().st_mtime_ns
    except OSError:
        return ""
    parts = [
        socket.gethostname(), str(path), changed, list(args), world_size, settings_of(plan), plan.options,
        list(plan.strategies),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:32]


def remember(key: str, forecast: KnownForecast) -> str:
    """Saves a forecast in the user's folder. Returns "", or why it could not be saved."""
    if not key:
        return "the script was not found"
    folder = _folder()
    path = folder / f"{key}.json"
    try:
        replace_text(path, json.dumps(asdict(forecast)) + "\n")
        newest_first = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in newest_first[_MOST:]:
            file.unlink(missing_ok=True)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""


def recall(key: str) -> KnownForecast | None:
    """Returns a saved forecast; None if there is none, or its file is damaged."""
    try:
        forecast: KnownForecast = read_file(KnownForecast, json.loads((_folder() / f"{key}.json").read_text()))
    except (OSError, ValueError):
        return None
    return forecast


def _folder() -> Path:
    return user_folder(environment.snapshot(), "XDG_STATE_HOME", ".local/state") / "paceline" / "forecasts"
