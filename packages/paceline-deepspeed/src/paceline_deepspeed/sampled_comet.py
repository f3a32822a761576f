"""`SampledComet`: the monitor `comet` of a config, on the tracker of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_lens.trackers.comet_ml import CometTracker


class SampledComet(CometTracker):
    """Comet, which gets each number at most once in so many samples.

    Args:
        every: that many samples.
        experiment_name: None lets Comet name the experiment.
        options: those of `comet_ml.start`.
    """

    name = "comet"

    def __init__(self, every: int, experiment_name: str | None, **options: Any) -> None:
        super().__init__(".", **options)
        self._every = every
        self._title = experiment_name
        self._last: dict[str, int] = {}

    def open_run(self, run: str) -> Any:
        experiment = super().open_run(run)
        if self._title is not None:
            experiment.set_name(self._title)
        return experiment

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        samples = step or 0
        due = {}
        for name, value in values.items():
            if name not in self._last or samples - self._last[name] >= self._every:
                due[name] = value
                self._last[name] = samples
        super().log(due, step, **options)
