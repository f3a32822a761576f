"""`LibraryTracker` is the base class of trackers that pass values to another library, which is imported when a run starts."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from paceline.base import env
from paceline.base.errors import PacelineError, TrackerError
from paceline.base.log import warn_once
from paceline.observe.trackers.tracker import Status, not_open


class LibraryTracker(ABC):
    """Writes the values of a run with the client of another library.

    A subclass opens a run in `open_run`, and calls the library in the other methods.

    Args:
        folder: where the run's files go, for a library that writes files.
        options: passed to the library's call that begins a run.

    Attributes:
        name: the name of the tracker.
        requires: the modules that must be installed.
        package: the name by which pip installs them.
        without_server: what to do without a login or a server. It is the fix in the error if no run can begin.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    package: ClassVar[str]
    without_server: ClassVar[str] = "leave it out of log_with"

    def __init__(self, folder: str | Path = ".", **options: object) -> None:
        self.folder = Path(folder)
        self.options: Mapping[str, Any] = options
        self._run: Any = None
        self._earlier_run: str | None = None

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
        """Begins a run of this name (a project, where the library has projects of runs) and stores its settings.

        Raises:
            TrackerError: `tracker-start`, if the library cannot begin, for example without a login or a server.
        """
        try:
            with _no_questions():
                self._run = self.open_run(run)
            if config:
                self.store_config(config)
        except (PacelineError, TypeError):
            raise  # a TypeError names an option of init_kwargs that the library does not have
        except Exception as error:  # each library has its own classes of errors
            message = " ".join(str(error).split()) or type(error).__name__
            what = f"the tracker {self.name!r} cannot begin its run {run!r}."
            why = [f"{self.package} says: {message}"]
            if self._earlier_run is not None:
                why.append(f"it was to go on with its run {self._earlier_run}, which it wrote before")
            raise TrackerError("tracker-start", what, why=why, fix=self.without_server) from error

    def run_id(self) -> str | None:
        """Returns what a later process needs to continue this run; None if the library cannot continue runs."""
        return None

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the options with which `open_run` continues a run; those of the script take precedence."""
        return {}

    def resume(self, run_id: str) -> None:
        """Makes `start` continue a run that an earlier process began."""
        self._earlier_run = run_id
        self.options = {**self.resume_options(run_id), **self.options}

    def finish(self, status: Status = "finished") -> None:
        """Ends the run; after an error as a failed one, if the library knows failed runs."""
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
        """Returns the values that are numbers, NumPy's among them; warns once that others are left out."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, int | float):
                numbers[name] = value
            # NumPy registers its numbers as real ones. The libraries and JSON want Python's own.
            elif isinstance(value, Real):
                numbers[name] = float(value)
        others = sorted(values.keys() - numbers.keys())
        if others:
            warn_once("observe", f"{self.name} takes numbers only: {', '.join(others)} are left out.")
        return numbers


@contextmanager
def _no_questions() -> Iterator[None]:
    """Keeps a library from asking for a key on the terminal if there are several processes, which would wait for ever."""
    if env.get("WORLD_SIZE") in (None, 1):
        yield
        return
    terminal = sys.stdin
    with open("/dev/null", encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = terminal


Image = Any  # a numpy array of [height, width, channels] or a PIL image
Images = Mapping[str, Sequence[Image]]
