"""Numbers for TensorBoard, in event files under `<folder>/<run>`: scalars, text, groups of scalars, hparams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.errors import TrackerError
from paceline.observe.trackers.tracker import flatten, not_open


class TensorBoardTracker:
    """Writes TensorBoard's event files.

    Args:
        folder: each run gets a folder of its name below it.
        options: passed to `torch.utils.tensorboard.SummaryWriter`, such as `flush_secs` (seconds, 10 here).
    """

    name = "tensorboard"
    requires = ("tensorboard",)
    package = "tensorboard"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder = Path(folder)
        self.options = {"flush_secs": 10} | options
        self._writer: Any = None

    @property
    def native(self) -> Any:
        """The `SummaryWriter`: for histograms, images and whatever else it can."""
        if self._writer is None:
            raise not_open(self.name)
        return self._writer

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Opens event files under `<folder>/<run>` and stores `config` as hyper-parameters."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(self.folder / run), **self.options)
        if config:
            # Not `add_hparams`, which would open a second run in a folder of its own.
            for summary in hparams({name: _hparam(value) for name, value in flatten(config).items()}, {}):
                self._writer.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes numbers as scalars, text as text, and a dict of numbers as one group of scalars.

        Raises:
            TrackerError: `tracker-value`, for any other value; what stands before it is written.
        """
        for name, value in values.items():
            if isinstance(value, str):
                self.native.add_text(name, value, global_step=step)
            elif isinstance(value, Mapping):
                self.native.add_scalars(name, {str(k): _number(f"{name}/{k}", v) for k, v in value.items()}, step)
            else:
                self.native.add_scalar(name, _number(name, value), global_step=step)

    def finish(self, status: str = "finished") -> None:
        """Stores how the run ended as text and closes the files."""
        self.native.add_text("status", status)
        self.native.close()
        self._writer = None


def _hparam(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises either of the last two
        shape = getattr(value, "shape", None)
        raise TrackerError(
            "tracker-value",
            f"the tensorboard tracker cannot write {name}, a {type(value).__name__}.",
            why="it writes numbers, text and dicts of numbers"
            + (f"; shape {tuple(shape)}" if shape is not None else ""),
            fix='log a number, or use get_tracker("tensorboard", unwrap=True) for histograms and images',
        ) from None


TRACKER = TensorBoardTracker
