"""`SwanLabTracker` writes to SwanLab. `init_kwargs={"swanlab": {"mode": "local"}}` keeps the values on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.observe.trackers.library import Images
from paceline_lens.trackers.init_tracker import InitTracker


class SwanLabTracker(InitTracker):
    """Writes to SwanLab. `options` are those of `swanlab.init`; the run's name is the project."""

    name = "swanlab"
    requires = ("swanlab",)
    package = "swanlab"
    without_server = "log in by `swanlab login`, or keep files: init_kwargs={'swanlab': {'mode': 'offline'}}"
    failed: ClassVar[Mapping[str, Any]] = {"state": "crashed", "error": "the run ended by an error"}

    def log_images(self, values: Images, step: int | None = None, **options: object) -> None:
        """Writes lists of images by name; `options` are those of `swanlab.Image`."""
        for name, images in values.items():
            self.log({name: [self.library.Image(image, **options) for image in images]}, step)


TRACKER = SwanLabTracker
