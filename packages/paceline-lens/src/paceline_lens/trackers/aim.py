"""`AimTracker` writes numbers and images to an Aim repository (`.aim`) in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status


class AimTracker(LibraryTracker):
    """Writes to an Aim repository. `options` are those of `aim.Run`."""

    name = "aim"
    requires = ("aim",)
    package = "aim"

    def open_run(self, run: str) -> Any:
        """Begins a run."""
        from aim import Run

        writer = Run(**{"repo": str(self.folder), **self.options})
        writer.name = run
        return writer

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings."""
        self.native["hparams"] = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes values."""
        for name, value in values.items():
            self.native.track(value, name=name, step=step, **options)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Writes images by name; a value may be a pair of an image and its caption.

        Args:
            values: the images.
            step: the optimizer step.
            kwargs: options of `aim.Image` under "aim_image", and of `Run.track` under "track".
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.native.track(picture, name=name, step=step, **options.get("track", {}))

    def run_id(self) -> str | None:
        """Returns the hash that Aim gave the run."""
        return str(self.native.hash)

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the option that continues a run."""
        return {"run_hash": run_id}

    def close_run(self, status: Status) -> None:
        """Ends the run."""
        self.native.close()


TRACKER = AimTracker
