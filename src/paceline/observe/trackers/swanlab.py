"""Numbers and images for SwanLab; `init_kwargs={"swanlab": {"mode": "local"}}` keeps them on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.trackers.library import Images, LibraryTracker
from paceline.observe.trackers.tracker import Status


class SwanLabTracker(LibraryTracker):
    """Writes to SwanLab. `options` are those of `swanlab.init`; the run's name is the project."""

    name = "swanlab"
    requires = ("swanlab",)
    package = "swanlab"
    without_server = "log in by `swanlab login`, or keep files: init_kwargs={'swanlab': {'mode': 'offline'}}"

    def open_run(self, run: str) -> Any:
        """Begins a run."""
        import swanlab

        return swanlab.init(**{"project": run, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        import swanlab

        swanlab.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers, and what SwanLab has types for."""
        self.native.log(dict(values), step=step, **options)

    def log_images(self, values: Images, step: int | None = None, **options: object) -> None:
        """Writes lists of images by name; `options` are those of `swanlab.Image`."""
        import swanlab

        for name, images in values.items():
            self.log({name: [swanlab.Image(image, **options) for image in images]}, step)

    def run_id(self) -> str | None:
        """The run's id."""
        return str(self.native.id)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Goes on with a run."""
        return {"id": run_id, "resume": "allow"}

    def close_run(self, status: Status) -> None:
        """Ends the run; after an error as a crashed one."""
        if status == "finished":
            self.native.finish()
        else:
            self.native.finish(state="crashed", error="the run ended by an error")


TRACKER = SwanLabTracker
