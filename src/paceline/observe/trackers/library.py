"""`LibraryTracker`: what trackers have in common that hand numbers to another library, which is imported when a run starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.base.log import warn_once
from paceline.observe.trackers.tracker import Status, not_open


class LibraryTracker(ABC):
    """Writes a run's numbers by another library's client.

    A subclass opens a run in `open_run`, and calls the library in the other methods.

    Args:
        folder: where the run's files go, for a library that keeps files.
        options: passed to the library's call that begins a run.

    Attributes:
        name: of the tracker.
        requires: modules that must be there.
        package: what pip installs for them.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    package: ClassVar[str]

    def __init__(self, folder: str | Path = ".", **options: object) -> None:
        self.folder = Path(folder)
        self.options = options
        self._run: Any = None

    @property
    def native(self) -> Any:
        """The library's own object for the run.

        Raises:
            TrackerError: `tracker-closed`, before `start` and after `finish`.
        """
        if self._run is None:
            raise not_open(self.name)
        return self._run

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Begins a run of this name (a project, where the library has projects of runs) and stores its settings."""
        self._run = self.open_run(run)
        if config:
            self.store_config(config)

    def finish(self, status: Status = "finished") -> None:
        """Ends the run; after an error the library is told so, where it can be."""
        if self._run is None:
            raise not_open(self.name)
        try:
            self.close_run(status)
        finally:
            self._run = None

    @abstractmethod
    def open_run(self, run: str) -> Any:
        """Begins a run, and returns the library's object for it."""

    @abstractmethod
    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings of the run."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes values by name; `options` are those of the library's own call."""

    @abstractmethod
    def close_run(self, status: Status) -> None:
        """Ends the run."""

    def numbers_of(self, values: Mapping[str, Any]) -> dict[str, float]:
        """The values that are numbers; of the others it says once that they are left out."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        others = sorted(values.keys() - numbers.keys())
        if others:
            warn_once("observe", f"{self.name} takes numbers only: {', '.join(others)} are left out.")
        return numbers


Image = Any  # a numpy array of [height, width, channels] or a PIL image
Images = Mapping[str, Sequence[Image]]
