"""Numbers for Trackio, which keeps them in a local database (`trackio show` opens it) or in a Space of the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.trackers.library import InitTracker


class TrackioTracker(InitTracker):
    """Writes to Trackio. `options` are those of `trackio.init`; the run's name is the project."""

    name = "trackio"
    requires = ("trackio",)
    package = "trackio"

    def run_id(self) -> str | None:
        """The run's id."""
        return str(self.native.name)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Goes on with a run."""
        return {"name": run_id, "resume": "allow"}


TRACKER = TrackioTracker
