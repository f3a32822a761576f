"""`Tracker` is the protocol of a class that writes the logged values of a run. `Trackers` (`group.py`) calls it.

Each implementation has a file in this folder, which the registry finds by its line `TRACKER = Class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.base.errors import Problem, TrackerError
from paceline.base.registry import Registry

TRACKERS = Registry("paceline.trackers", "tracker")
DELIVERIES = Registry("paceline.deliveries", "way to send the values of trackers")

Status = Literal["finished", "failed"]


@runtime_checkable
class Tracker(Protocol):
    """Writes the values of one run. It exists on the main process alone, so that it must not communicate.

    A class is constructed as `Class(folder, **options)`: `folder` is where the run's files go, and `options` are those of
    `init_kwargs[name]`. It may have further attributes:

        requires: the modules that it needs. Every rank checks that they are installed, before anything is written.
        package: the name by which pip installs them.
        native: the object that it wraps.
        run_id(), resume(run_id): continue a run that an earlier process began.
    """

    name: str

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Opens the run called `run` and stores its settings."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes values by name; `step` is the number of the optimizer step, or None if the caller does not count steps."""

    def finish(self, status: Status = "finished") -> None:
        """Writes buffered values and closes the run."""


@runtime_checkable
class Deliverable(Protocol):
    """A tracker whose values a thread sends, since its client would wait for the server."""

    name: str

    def address(self) -> dict[str, Any]:
        """Returns what another process needs to send values to the same run: plain JSON without secrets; "id" is the run."""

    def numbers_of(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Returns the values that this tracker accepts."""

    @staticmethod
    def send(address: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Sends entries, at most 1000 values. It may be called again with entries that have arrived already.

        Any error means: try again later. One of the delivery's own says that the server will never take them.
        """

    def abandon(self) -> None:
        """Closes the run on this side alone, since the server does not answer."""


class DeliveryOfValues(Protocol):
    """Sends the values of one `Deliverable` tracker while training goes on; an entry point `thread` of `paceline.deliveries`.

    It is constructed as `Class(tracker, folder)`, with the folder of the run.

    Attributes:
        tracker: the tracker.
        path: the file with values that were not sent yet.
    """

    tracker: Deliverable
    path: Path

    def put(self, values: Mapping[str, Any], step: int | None) -> None:
        """Takes values, and returns at once."""

    def finish(self, status: str, timeout_s: float) -> Problem | None:
        """Sends the remaining values and the status of the run, for at most `timeout_s`; returns what could not be sent."""


class BlankTracker:
    """Replaces a tracker on all ranks but the main one: it accepts every call and does nothing."""

    name = "blank"

    def __getattr__(self, attribute: str) -> BlankTracker:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self

    def __call__(self, *args: object, **kwargs: object) -> BlankTracker:
        return self


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings as one level: `{"data": {"seed": 1}}` becomes `{"data/seed": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            for inner_name, inner_value in flatten(value).items():
                flat[f"{name}/{inner_name}"] = inner_value
        else:
            flat[str(name)] = value
    return flat


def plain_value(value: object) -> bool | int | float | str:
    """Returns a setting as a number or text."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def not_open(name: str) -> TrackerError:
    """Returns the error for a tracker that is used before `start` or after `finish`."""
    return TrackerError(
        "tracker-closed",
        f"the {name} tracker is not open.",
        why="start() has not been called, or finish() has been",
        fix="call accelerator.init_trackers(...) before the first log, and end_training() after the last",
    )
