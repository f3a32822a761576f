"""What an engine says after each step: DeepSpeed's monitors on our trackers (tensorboard, csv, wandb and comet), and its line.

    Monitors(config, is_main=...)            every rank: packages are looked up, all problems are raised at once
        .write_events([(name, value, step)])     main process: each event goes to each monitor

The names of events and the layout of files are DeepSpeed's: `{output_path}/{job_name}/Train_Samples_lr.csv`.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.base.errors import Problem, TrackerError
from paceline.observe.trackers.group import Trackers
from paceline.observe.trackers.tensorboard import TensorBoardTracker
from paceline.observe.trackers.tracker import TRACKERS
from paceline.world.runtime import current
from paceline.world.world import World
from paceline_deepspeed.config import DeepSpeedConfig
from paceline_deepspeed.profiling import Timers

if TYPE_CHECKING:
    from paceline_deepspeed.engine_parts import Engine

Event = tuple[str, Any, int]


class CsvMonitor:
    """A file for each name of an event: its last part heads the column. A run of the same name is appended to."""

    name = "csv_monitor"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self.folder = self.folder / run
        self.folder.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in values.items():
            path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            new = not path.exists()
            # Opened for each row: a run that is killed has written all rows up to then.
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([step, value])

    def finish(self, status: str = "finished") -> None:
        """Does nothing: no file is open between two calls."""


_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")
_OF_COMET = ("project", "workspace", "api_key", "experiment_key", "online", "mode")


def _tracker(name: str, block: Mapping[str, Any]) -> Any:
    """Makes the tracker that a block of the config describes."""
    if name == "tensorboard":
        return TensorBoardTracker(block["output_path"] or ".")
    if name == "csv_monitor":
        return CsvMonitor(block["output_path"] or ".")
    if name == "wandb":
        return TRACKERS.get("wandb")(".", project=block["project"], group=block["group"], entity=block["team"])
    # What the config leaves open is Comet's own choice, which a None would override.
    from paceline_deepspeed.sampled_comet import SampledComet

    given = {key: block[key] for key in _OF_COMET if block[key] is not None}
    return SampledComet(block["samples_log_interval"], block["experiment_name"], **given)


class Monitors:
    """What the config enables. Events of other processes than the main one are dropped.

    Ranks: all make it, and see the same errors.

    Raises:
        TrackerError: `deepspeed-monitor`.
    """

    def __init__(self, config: DeepSpeedConfig, *, is_main: bool) -> None:
        trackers: list[Any] = []
        job_names: list[str] = []
        problems: list[Problem] = []
        for name in _MONITORS:
            if not config[f"{name}.enabled"]:
                continue
            block = config[name].values
            # Nothing is opened yet, so that all missing packages are known before the first run begins.
            tracker = _tracker(name, block)
            trackers.append(tracker)
            job_names.append(block.get("job_name") or "DeepSpeedJobName")
            place = config.places.get(f"{name}.enabled", config.source)
            for package in getattr(tracker, "requires", ()):
                if importlib.util.find_spec(package):
                    continue
                what = f"the monitor {name} needs {package}, which is not installed."
                why = f"{name}.enabled is true ({place})"
                fix = f"`pip install {package}`, or write `enabled: false`; csv_monitor needs no package"
                problems.append(Problem("deepspeed-monitor", what, why=why, fix=fix))
        if problems:
            raise TrackerError.of(problems)
        # One tracker each: their runs have names of their own.
        self._groups = [Trackers([tracker], "runs", is_main=is_main) for tracker in trackers]
        for group, job_name in zip(self._groups, job_names, strict=True):
            group.start(job_name)

    @property
    def enabled(self) -> bool:
        return bool(self._groups)

    def write_events(self, events: Sequence[Event]) -> None:
        """Hands each (name, value, step) to each monitor, on the main process."""
        for group in self._groups:
            if group.is_main:
                for name, value, step in events:
                    group.log({name: value}, step)

    def finish(self) -> None:
        """Closes files; what is left open at the interpreter's end is closed then."""
        for group in self._groups:
            group.finish()


class MonitorMaster(Monitors):
    """The monitors of a script without an engine: `MonitorMaster(DeepSpeedConfig("config.json").monitor_config)`.

    Args:
        monitor_config: of a config, or of `get_monitor_config`.
    """

    def __init__(self, monitor_config: SimpleNamespace) -> None:
        runtime = current()
        is_writer = World.detect().rank == 0 and runtime.keeps_files and runtime.tracks
        super().__init__(monitor_config.parsed, is_main=is_writer)


class StepEvents:
    """What an engine says after a step: to its monitors, a line every `steps_per_print` steps, and how long phases took."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        runtime = engine.accelerator.run.runtime
        is_writer = engine.accelerator.is_main_process and runtime.keeps_files and runtime.tracks
        self.monitors = Monitors(engine.config, is_main=is_writer)
        self.timers = Timers(engine)

    def after_step(self, boundary: bool) -> None:
        """Tells what is due after a micro-batch; `boundary` where it ended a window."""
        engine = self._engine
        self.timers.after_step(boundary)
        if not (boundary and engine.accelerator.is_main_process):
            return
        if self.monitors.enabled:
            self.monitors.write_events(self._values())
        every = engine.config["steps_per_print"]
        if every and engine.global_steps % every == 0:
            scale = ""
            if engine.config["fp16.enabled"]:
                scale = f", loss scale={engine.view.loss_scale():g}"
            print(
                f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
                f"mom={engine.get_mom()}{scale}",
                flush=True,
            )

    def _values(self) -> list[Event]:
        engine = self._engine
        samples = engine.global_samples
        events: list[Event] = [("Train/Samples/lr", float(engine.get_lr()[0]), samples)]
        if engine.config["fp16.enabled"]:
            events.append(("Train/Samples/loss_scale", engine.view.loss_scale(), samples))
        if engine.config["wall_clock_breakdown"]:
            for name, ms in self.timers.values():
                events.append((f"Train/Samples/{name}", ms, samples))
        return events
