"""`ClearMLTracker` writes to ClearML. `CLEARML_PROJECT` and `CLEARML_TASK` name the project and the task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.base import env as environment
from paceline.base.log import warn_once
from paceline.observe.trackers.library import Images, LibraryTracker
from paceline.observe.trackers.tracker import Status

_SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """Writes to the current ClearML task, or to a new one if there is none. `options` are those of `Task.init`."""

    name = "clearml"
    requires = ("clearml",)
    package = "clearml"
    without_server = "configure it by `clearml-init`, or keep files: CLEARML_OFFLINE_MODE=1"

    def open_run(self, run: str) -> Any:
        """Takes the current task, or begins one."""
        from clearml import Task

        current = Task.current_task()
        self._is_ours = current is None
        if current is not None:
            return current
        env = environment.snapshot()
        names = {"project_name": env.get("CLEARML_PROJECT", run), "task_name": env.get("CLEARML_TASK", run)}
        return Task.init(**{**names, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        self.native.connect_configuration(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers: curves with a step, single values without."""
        writer = self.native.get_logger()
        for name, value in values.items():
            if not isinstance(value, int | float):
                warn_once("observe", f"clearml takes numbers only: {name}, a {type(value).__name__}, is left out.")
            elif not math.isfinite(value):
                warn_once("observe", f"{name} is {value}, which ClearML would show as 0: it is left out.")
            elif step is None:
                writer.report_single_value(name=name, value=value, **options)
            else:
                title, series = _place(name)
                writer.report_scalar(title=title, series=series, value=value, iteration=step, **options)

    def log_images(self, values: Images, step: int | None = None, **options: object) -> None:
        """Writes images by name."""
        writer = self.native.get_logger()
        for name, image in values.items():
            title, series = _place(name)
            writer.report_image(title=title, series=series, iteration=step, image=image, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **options: object,
    ) -> None:
        """Writes a table: a pandas `dataframe`, or `data`, whose first row is the heading where `columns` is None.

        Raises:
            ValueError: where neither is given.
        """
        if dataframe is None and data is None:
            raise ValueError("log_table needs `dataframe`, or `data` and `columns`")
        table = dataframe
        if dataframe is None:
            heading = [] if columns is None else [list(columns)]
            table = [*heading, *(data or ())]
        title, series = _place(table_name)
        self.native.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **options)

    def run_id(self) -> str | None:
        """Returns the id of the task."""
        return str(self.native.id)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the options that continue a task. With the offset 0, ClearML does not add the last step to the next ones."""
        return {"reuse_last_task_id": run_id, "continue_last_task": 0}

    def close_run(self, status: Status) -> None:
        """Ends the task if this tracker has begun it; after an error as a failed one."""
        if not self._is_ours:
            return
        if status == "failed":
            self.native.mark_failed(status_message="the run ended by an error")
        self.native.close()


def _place(name: str) -> tuple[str, str]:
    """Returns the title and the series of a value: "eval_loss" has the title "loss" and the series "eval"."""
    series, _, title = name.partition("_")
    if series in _SERIES and title:
        return title, series
    return name, "train"


TRACKER = ClearMLTracker
