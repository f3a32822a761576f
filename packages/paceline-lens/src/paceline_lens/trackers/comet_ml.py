"""`CometTracker` writes numbers and texts to Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class CometTracker(LibraryTracker):
    """Writes to Comet. `options` are those of `comet_ml.start`; the run's name is the project."""

    name = "comet_ml"
    requires = ("comet_ml",)
    package = "comet_ml"
    without_server = "set COMET_API_KEY, or keep files: init_kwargs={'comet_ml': {'online': False}}"

    def open_run(self, run: str) -> Any:
        """Begins an experiment."""
        import comet_ml

        # Comet has two names for the project, and refuses both at once.
        project = {} if "project" in self.options else {"project_name": run}
        return comet_ml.start(**{**project, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        self.native.log_parameters(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers as metrics, texts as other values, and dicts of numbers as several metrics."""
        if step is not None:
            self.native.set_step(step)
        for name, value in values.items():
            if isinstance(value, int | float):
                self.native.log_metric(name, value, step=step, **options)
            elif isinstance(value, str):
                self.native.log_other(name, value, **options)
            elif isinstance(value, Mapping):
                self.native.log_metrics(dict(value), step=step, **options)

    def run_id(self) -> str | None:
        """Returns the key of the experiment."""
        return str(self.native.get_key())

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the options that continue an experiment."""
        return {"experiment_key": run_id, "mode": "get"}

    def close_run(self, status: Status) -> None:
        """Ends the experiment."""
        self.native.end()


TRACKER = CometTracker
