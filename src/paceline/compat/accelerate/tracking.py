"""`accelerate.tracking`: trackers that scripts write, among ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.base.errors import TrackerError
from paceline.observe.trackers.group import Trackers
from paceline.observe.trackers.tracker import TRACKERS


class GeneralTracker:
    """Base of trackers that scripts write: `name`, `tracker`, and the methods below."""

    main_process_only = True
    name = "custom"
    requires_logging_directory = False
    tracker: Any = None

    def __init__(self, _blank: bool = False) -> None:
        pass

    def start(self) -> None:
        """Begins."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keeps the run's settings."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Takes values."""

    def finish(self) -> None:
        """Ends."""


class _Adapted:
    """A script's tracker as one of ours."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.name, self.shown = tracker.name, tracker

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self.shown.start()
        if config:
            self.shown.store_init_configuration(dict(config))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.shown.log(values, step=step)

    def finish(self, status: str = "finished") -> None:
        self.shown.finish()


class TrackerList(Trackers):
    """The trackers of a run, which scripts also walk through as a list of those that were started."""

    def __init__(self, wanted: Any, folder: str, *, is_main: bool = True) -> None:
        several = list(wanted) if isinstance(wanted, list | tuple) else [] if wanted is None else [wanted]
        adapted = [_Adapted(each) if isinstance(each, GeneralTracker) else each for each in several]
        super().__init__(adapted, folder, is_main=is_main)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker as the script knows it, or with `unwrap` what it wraps."""
        found = super().get_tracker(name, unwrap)
        if not isinstance(found, _Adapted):
            return found
        return found.shown.tracker if unwrap else found.shown

    def _shown(self) -> list[Any]:
        return [getattr(each, "shown", each) for each in self.started.values()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self.started)

    def __getitem__(self, place: Any) -> Any:
        return self._shown()[place]


def get_available_trackers() -> list[str]:
    """Names of trackers whose packages are installed."""
    return Trackers("all", ".").names


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """The trackers of `log_with` that can be used."""
    several = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    usable = []
    for each in several:
        try:
            TrackerList([each], ".")
        except TrackerError:
            continue
        usable.append(each)
    return usable


LOGGER_TYPE_TO_CLASS = {name: TRACKERS.get(name) for name in TRACKERS.names()}
