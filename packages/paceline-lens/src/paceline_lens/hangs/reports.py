"""What the core asks of reports of hangs: the functions of `paceline.world.hang_reports.HangReports`, by where they are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FUNCTIONS = {
    "watch_waits": ("waits", "watch"),
    "backward_failed": ("waits", "backward_failed"),
    "backward_passed": ("waits", "backward_passed"),
    "last_report": ("waits", "last_report"),
    "watch_progress": ("progress_file", "watch"),
    "call_check": ("debug", "CallCheck"),
    "suggestion": ("debug", "suggestion"),
    "stuck_watch": ("stuck", "StuckWatch"),
}


def __getattr__(name: str) -> Any:
    # Each is imported when it is first asked for: a launcher asks for `stuck_watch` alone, and must not load torch.
    if name not in _FUNCTIONS:
        raise AttributeError(name)
    module, function = _FUNCTIONS[name]
    return getattr(import_module(f"paceline_lens.hangs.{module}"), function)
