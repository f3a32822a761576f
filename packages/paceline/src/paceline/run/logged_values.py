"""`LoggedValues`: what `Accelerator.log` hands on: the values of the script, and those of the system where a setting asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.run.run import Run

if TYPE_CHECKING:
    from paceline.observe.profiles import Profiles
    from paceline.run.system_values import SystemValues


class LoggedValues:
    """The values that a run logs: those of the script, and those of the system where the setting asks for them.

    Args:
        run, profiles: as for `SystemValues`.
    """

    def __init__(self, run: Run, profiles: Profiles | None) -> None:
        self._run = run
        self._system: SystemValues | None = None
        # Without the setting nothing is measured, and no store is joined.
        if run.settings.log_system and run.runtime.keeps_files:
            from paceline.run.system_values import SystemValues  # few runs ask for them

            self._system = SystemValues(run, profiles)

    def record(self, values: Mapping[str, Any], step: int | None) -> Mapping[str, Any]:
        """Passes values to the journal of a watched run, and returns what the trackers get."""
        self._run.runtime.logged(values, step)
        if self._system is not None:
            values = {**values, **self._system.read()}
        self._run.events.logged(values, step)
        return values
