"""`Trackers` holds the trackers of one run, and `Accelerator.log` calls it. Only the main process has trackers.

Trackers(["tensorboard"], folder)   every rank: looks up names and packages, and raises all problems at once
  .start("digits", config)          main process: constructs and starts each tracker
  .log({"loss": 0.7}, step=10)      main process: reads tensors once, then each tracker gets them
  .finish()                         main process. A run that ends without it is finished at exit, after an error as "failed"

On other ranks these calls do nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.errors import Problem, TrackerError
from paceline.base.log import warn_once
from paceline.base.parts import extra_with, how_to_install
from paceline.observe.trackers.run_ids import RunIds
from paceline.observe.trackers.tracker import TRACKERS, BlankTracker, Status, Tracker

Wanted = str | type | Tracker


class Trackers:
    """The trackers of one run.

    Args:
        wanted: names (`"all"` for each tracker whose packages are installed), `Tracker` classes or instances.
        folder: where trackers write their files.
        is_main: whether this process constructs trackers: the main one, where files are kept (see `Runtime`).

    Ranks: all construct it, and raise the same errors. Nothing here communicates.

    Raises:
        TrackerError: `tracker-unknown`, `tracker-missing`, `tracker-shape`; all at once.
    """

    def __init__(self, wanted: Wanted | Iterable[Wanted] | None, folder: str | Path, *, is_main: bool = True) -> None:
        self.folder = str(folder)
        self.is_main = is_main
        self.started: dict[str, Tracker] = {}
        self._wanted = _resolve(_as_list(wanted))
        # It runs when this object is collected, or at exit. It gets only the dict: a reference to `self` would keep it alive.
        weakref.finalize(self, _finish_left_over, self.started, os.getpid())

    @property
    def names(self) -> list[str]:
        """The names of the trackers that were asked for, in order."""
        return list(self._wanted)

    def start(
        self,
        run: str,
        config: Mapping[str, Any] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Starts each tracker for the run called `run`.

        Args:
            config: settings to store with the run.
            options: constructor arguments by tracker name, such as `{"tensorboard": {"flush_secs": 60}}`.
            goes_on: whether training goes on from a checkpoint; trackers then go on in the runs that they wrote before.
        """
        self._check_options(options or {})
        if not self.is_main:
            return
        self.finish()
        run_ids = RunIds(self.folder_of(run))
        earlier = run_ids.earlier(goes_on=goes_on)
        ids: dict[str, str] = {}
        for name, chosen in self._wanted.items():
            tracker: Any = chosen
            if isinstance(chosen, type):
                keywords = (options or {}).get(name, {})
                tracker = chosen(self.folder, **keywords)
            # A tracker of the user's own need not be able to continue a run.
            if name in earlier and hasattr(tracker, "resume"):
                tracker.resume(earlier[name])
            tracker.start(run, dict(config or {}))
            self.started[name] = tracker
            run_id = tracker.run_id() if hasattr(tracker, "run_id") else None
            if run_id is not None:
                ids[name] = run_id
        if ids:
            run_ids.write(ids)

    def folder_of(self, run: str) -> Path:
        """Returns the folder with what a later process needs to continue a run."""
        return Path(self.folder) / run

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Passes values to each tracker. Tensors with one element become numbers first; each needs one read of the device."""
        if not self.started:
            if self._wanted and self.is_main:
                warn_once(
                    "observe",
                    f"values were logged while no tracker runs, and are lost (log_with = {self.names}): call "
                    "`init_trackers` before the first `log`, and `end_training` after the last.",
                )
            return
        plain = {str(name): _number_of(value) for name, value in values.items()}
        for tracker in self.started.values():
            tracker.log(plain, step)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns the tracker called `name`; on other ranks and before `start` a blank one, which accepts every call.

        Args:
            name: the name of the tracker.
            unwrap: whether to return the object that the tracker wraps (its `native`), such as TensorBoard's SummaryWriter.

        Raises:
            TrackerError: `tracker-unknown`, on every rank, if the run has no tracker of that name.
        """
        if name not in self._wanted:
            raise TrackerError(
                "tracker-unknown",
                f"this run has no tracker called {name!r}.",
                why=f"log_with = {self.names}",
                fix=f"add it: Accelerator(log_with={[*self.names, name]})",
            )
        tracker = self.started.get(name)
        if tracker is None:
            return BlankTracker()
        return getattr(tracker, "native", tracker) if unwrap else tracker

    def finish(self, status: Status = "finished") -> None:
        """Finishes each tracker, also if another one raises; the first error is raised then."""
        _finish(self.started, status)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - set(self._wanted))
        if unknown:
            raise TrackerError(
                "tracker-unknown",
                f"init_kwargs names {', '.join(unknown)}, which this run does not use.",
                why=f"log_with = {self.names}",
                fix=f"use one of these names, or add it: Accelerator(log_with={[*self.names, *unknown]})",
            )


def _as_list(wanted: Wanted | Iterable[Wanted] | None) -> list[Wanted]:
    if wanted is None:
        return []
    if isinstance(wanted, list | tuple | set | frozenset):
        return list(wanted)
    return [wanted]  # type: ignore[list-item]


def _resolve(wanted: Sequence[object]) -> dict[str, type | Tracker]:
    """Returns classes and instances by name; raises all problems at once."""
    if "all" in wanted:
        installed = [name for name in TRACKERS.names() if not missing_modules(TRACKERS.get(name))]
        others = [item for item in wanted if item != "all" and item not in installed]
        wanted = [*installed, *others]
    chosen: dict[str, type | Tracker] = {}
    problems: list[Problem] = []
    for item in wanted:
        member_value = getattr(item, "value", None)
        if isinstance(member_value, str) and not isinstance(item, str | type):
            item = member_value  # a member of an enum of names
        if isinstance(item, str) and item not in TRACKERS.names():
            problems.append(_unknown(item))
            continue
        tracker: Any = TRACKERS.get(item) if isinstance(item, str) else item
        problem = _problem(tracker)
        if problem is None:
            chosen[tracker.name] = tracker
        else:
            problems.append(problem)
    if problems:
        raise TrackerError.of(problems)
    return chosen


def _unknown(name: str) -> Problem:
    fix = "use one of these names, or pass your own class with start, log and finish"
    extra = extra_with(TRACKERS.group, name)
    if extra:
        fix = how_to_install(extra)
    return Problem(
        "tracker-unknown",
        f"there is no tracker called {name!r}.",
        why=f"log_with names it; known: {', '.join(TRACKERS.names())}",
        fix=fix,
    )


def _problem(tracker: object) -> Problem | None:
    """Returns what is wrong with a class or an instance that should be a tracker; None if nothing is."""
    lacks = [attribute for attribute in ("name", "start", "log", "finish") if not hasattr(tracker, attribute)]
    if lacks:
        return Problem(
            "tracker-shape",
            f"{tracker!r} is not a tracker.",
            why=f"it lacks {', '.join(lacks)}",
            fix="give it `name`, `start(run, config)`, `log(values, step)` and `finish(status)`",
        )
    missing = missing_modules(tracker)
    if not missing:
        return None
    name = getattr(tracker, "name", "")
    package = getattr(tracker, "package", None)
    fix = "install what provides it, or leave this tracker out of log_with"
    if package:
        fix = f"pip install {package}"
    return Problem(
        "tracker-missing",
        f"the tracker {name!r} needs {', '.join(missing)}, which is not installed.",
        why=f"log_with names {name!r}; looked in {sys.prefix}",
        fix=fix,
    )


def missing_modules(tracker: object) -> list[str]:
    """Returns the modules that a tracker needs and that are not installed."""
    return [name for name in getattr(tracker, "requires", ()) if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _number_of(value: object) -> object:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value


def _finish(started: dict[str, Tracker], status: Status) -> None:
    errors: list[Exception] = []
    while started:
        _, tracker = started.popitem()
        try:
            tracker.finish(status)
        except Exception as error:
            errors.append(error)  # raised below, after the other trackers have closed their files
    if errors:
        raise errors[0]


def _finish_left_over(started: dict[str, Tracker], owner: int) -> None:
    """Finishes what a script left open. A forked process inherits the files but does not own them."""
    if os.getpid() == owner:
        _finish(started, "finished" if getattr(sys, "last_value", None) is None else "failed")
