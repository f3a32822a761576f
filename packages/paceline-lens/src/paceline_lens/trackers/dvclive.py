"""`DVCLiveTracker` writes numbers with DVCLive, to files in the working directory or in the folder of the option `dir`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.base.log import warn_once
from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class DVCLiveTracker(LibraryTracker):
    """Writes with a `dvclive.Live`. `options` are those of `Live`; the option `live` is a `Live` that the script has made."""

    name = "dvclive"
    requires = ("dvclive",)
    package = "dvclive"

    def open_run(self, run: str) -> Any:
        """Begins an experiment; DVC names it."""
        from dvclive import Live

        options = dict(self.options)
        live = options.pop("live", None)
        return Live(**options) if live is None else live

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        self.native.log_params(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers and texts, and ends a step."""
        from dvclive.plots import Metric

        if step is not None:
            self.native.step = step
        for name, value in values.items():
            if Metric.could_log(value):
                self.native.log_metric(name, value, **options)
            else:
                warn_once("observe", f"dvclive cannot write {name}, a {type(value).__name__}: it is left out.")
        self.native.next_step()

    def close_run(self, status: Status) -> None:
        """Ends the experiment."""
        self.native.end()


TRACKER = DVCLiveTracker
