"""`Tracker`: where a run's numbers go. One file an implementation, found by its line `TRACKER = Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.base.errors import TrackerError
from paceline.base.registry import Registry

TRACKERS = Registry("paceline.observe.trackers", "TRACKER", "paceline.trackers")

Status = Literal["finished", "failed"]


@runtime_checkable
class Tracker(Protocol):
    """Writes the numbers of one run somewhere. Lives on the main process alone, so it must not communicate.

    A class is constructed as `Class(folder, **options)`: `folder` is where the run's files go, `options` are those of
    `init_kwargs[name]`. It may name the modules that it needs in `requires`; they are looked for on every rank before
    anything is written, and in `package` what pip installs for them. A tracker that wraps another object may offer it as
    `native`.
    """

    name: str

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Opens the run called `run` and stores its settings."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes values by name; `step` is the number of the optimizer step, None where the caller does not count."""

    def finish(self, status: Status = "finished") -> None:
        """Writes what is still held back and closes the run."""


class BlankTracker:
    """Stands in for a tracker on ranks other than the main one: takes every call and does nothing."""

    name = "blank"

    def __getattr__(self, attribute: str) -> BlankTracker:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self

    def __call__(self, *args: object, **kwargs: object) -> BlankTracker:
        return self


def flatten(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Nested settings as one level: `{"data": {"seed": 1}}` becomes `{"data/seed": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}{separator}{inner}": item for inner, item in flatten(value, separator).items()}
        else:
            flat[str(name)] = value
    return flat


def not_open(name: str) -> TrackerError:
    """The error of a tracker that is used before `start` or after `finish`."""
    return TrackerError(
        "tracker-closed",
        f"the {name} tracker is not open.",
        why="start() has not been called, or finish() has been",
        fix="call accelerator.init_trackers(...) before the first log, and end_training() after the last",
    )
