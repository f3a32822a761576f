"""`WandbTracker` writes to Weights & Biases. `WANDB_MODE=offline` keeps the values in files, for `wandb sync` later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from paceline.observe.trackers.library import Images
from paceline_lens.trackers.init_tracker import InitTracker


class WandbTracker(InitTracker):
    """Writes to Weights & Biases. `options` are those of `wandb.init`; the run's name is the project."""

    name = "wandb"
    requires = ("wandb",)
    package = "wandb"
    without_server = "log in by `wandb login`, or set WANDB_MODE=offline and send the files later by `wandb sync`"
    failed: ClassVar[Mapping[str, Any]] = {"exit_code": 1}

    def log_images(self, values: Images, step: int | None = None, **options: object) -> None:
        """Writes lists of images by name; `options` are those of `wandb.Image`."""
        for name, images in values.items():
            self.log({name: [self.library.Image(image, **options) for image in images]}, step)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **options: object,
    ) -> None:
        """Writes a table: `columns` and `data`, or a pandas `dataframe`."""
        table = self.library.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **options)


TRACKER = WandbTracker
