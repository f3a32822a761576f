"""Numbers for Trackio, which keeps them in a local database (`trackio show` opens it) or in a Space of the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class TrackioTracker(LibraryTracker):
    """Writes to Trackio. `options` are those of `trackio.init`; the run's name is the project."""

    name = "trackio"
    requires = ("trackio",)
    package = "trackio"

    def open_run(self, run: str) -> Any:
        """Begins a run."""
        import trackio

        return trackio.init(**{"project": run, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        import trackio

        trackio.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes values."""
        self.native.log(dict(values), step=step, **options)

    def run_id(self) -> str | None:
        """The run's id."""
        return str(self.native.name)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Goes on with a run."""
        return {"name": run_id, "resume": "allow"}

    def close_run(self, status: Status) -> None:
        """Ends the run."""
        self.native.finish()


TRACKER = TrackioTracker
