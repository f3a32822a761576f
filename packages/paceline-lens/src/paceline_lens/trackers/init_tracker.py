"""`InitTracker` is the base class of trackers for libraries with the functions of wandb."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class InitTracker(LibraryTracker):
    """For libraries with the functions of wandb: `init` begins a run of a project, `config.update` stores its settings.

    Attributes:
        failed: the arguments of the run's `finish` after an error.
    """

    failed: ClassVar[Mapping[str, Any]] = {}

    @property
    def library(self) -> Any:
        """The library's module."""
        return import_module(self.requires[0])

    def open_run(self, run: str) -> Any:
        """Begins a run."""
        return self.library.init(**{"project": run, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings; those of a run that is continued may change."""
        self.library.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes values of any kind that the library takes."""
        self.native.log(dict(values), step=step, **options)

    def run_id(self) -> str | None:
        """Returns the id of the run."""
        return str(self.native.id)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the options that continue a run."""
        return {"id": run_id, "resume": "allow"}

    def close_run(self, status: Status) -> None:
        """Ends the run; after an error as a failed one."""
        if status == "finished":
            self.native.finish()
        else:
            self.native.finish(**self.failed)
