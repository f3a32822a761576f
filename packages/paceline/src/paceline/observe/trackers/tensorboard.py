"""`TensorBoardTracker` writes event files under `<folder>/<run>`: scalars, text, groups of scalars, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status, flatten, plain_value, refused


class TensorBoardTracker(LibraryTracker):
    """Writes TensorBoard's event files.

    Args:
        folder: each run gets a folder of its name below it.
        options: passed to `torch.utils.tensorboard.SummaryWriter`, such as `flush_secs` (seconds, 10 here).
    """

    name = "tensorboard"
    requires = ("tensorboard",)
    package = "tensorboard"

    def open_run(self, run: str) -> Any:
        """Opens event files under `<folder>/<run>`; the object is the `SummaryWriter`, for histograms and images."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder / run), **{"flush_secs": 10, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings as hyper-parameters."""
        from torch.utils.tensorboard.summary import hparams

        # Not `add_hparams`, which would open a second run in a folder of its own.
        settings = {name: plain_value(value) for name, value in flatten(values).items()}
        for summary in hparams(settings, {}):
            self.native.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes numbers as scalars, text as text, and a dict of numbers as one group of scalars.

        Raises:
            TrackerError: `tracker-value`, for any other value; the values before it are written.
        """
        for name, value in values.items():
            if isinstance(value, str):
                self.native.add_text(name, value, global_step=step, **options)
            elif isinstance(value, Mapping):
                numbers = {str(key): _number(f"{name}/{key}", number) for key, number in value.items()}
                self.native.add_scalars(name, numbers, global_step=step, **options)
            else:
                self.native.add_scalar(name, _number(name, value), global_step=step, **options)

    def close_run(self, status: Status) -> None:
        """Stores how the run ended as text and closes the files."""
        self.native.add_text("status", status)
        self.native.close()


def _number(name: str, value: SupportsFloat | str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises either of the last two
        fix = 'log a number, or use get_tracker("tensorboard", unwrap=True) for histograms and images'
        raise refused("tensorboard", name, value, "numbers, text and dicts of numbers", fix) from None


TRACKER = TensorBoardTracker
