"""`TrackioTracker` writes numbers to Trackio: a local database, which `trackio show` opens, or a Space of the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_lens.trackers.init_tracker import InitTracker


class TrackioTracker(InitTracker):
    """Writes to Trackio. `options` are those of `trackio.init`; the run's name is the project."""

    name = "trackio"
    requires = ("trackio",)
    package = "trackio"

    def run_id(self) -> str | None:
        """Returns the name of the run, by which Trackio identifies it."""
        return str(self.native.name)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the options that continue a run."""
        return {"name": run_id, "resume": "allow"}


TRACKER = TrackioTracker
