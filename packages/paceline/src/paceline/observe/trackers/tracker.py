"""`Tracker` is the protocol of a class that writes the logged values of a run. `Trackers` (`group.py`) calls it.

Each implementation has a file in this folder, which the registry finds by its line `TRACKER = Class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.base.errors import TrackerError
from paceline.base.registry import Registry

TRACKERS = Registry("paceline.trackers", "tracker")

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


def refused(tracker: str, name: str, value: object, takes: str, fix: str = "") -> TrackerError:
    """Returns the error for a value that a tracker cannot write.

    Args:
        tracker: its name.
        name: of the value.
        value: the value.
        takes: what it writes, in words.
        fix: what to do, where it is not to log a number.
    """
    shape = getattr(value, "shape", None)
    return TrackerError(
        "tracker-value",
        f"the {tracker} tracker cannot write {name}, a {type(value).__name__}.",
        why=f"it writes {takes}" + ("" if shape is None else f"; {name} has shape {tuple(shape)}"),
        fix=fix or f"log a number instead, such as {name}.mean().item()",
    )


def not_open(name: str) -> TrackerError:
    """Returns the error for a tracker that is used before `start` or after `finish`."""
    return TrackerError(
        "tracker-closed",
        f"the {name} tracker is not open.",
        why="start() has not been called, or finish() has been",
        fix="call accelerator.init_trackers(...) before the first log, and end_training() after the last",
    )
