"""Numbers, images and tables for Weights & Biases; `WANDB_MODE=offline` keeps them in files, for `wandb sync` later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.trackers.library import Images, LibraryTracker
from paceline.observe.trackers.tracker import Status


class WandbTracker(LibraryTracker):
    """Writes to Weights & Biases. `options` are those of `wandb.init`; the run's name is the project."""

    name = "wandb"
    requires = ("wandb",)
    package = "wandb"
    without_server = "log in by `wandb login`, or set WANDB_MODE=offline and send the files later by `wandb sync`"

    def open_run(self, run: str) -> Any:
        """Begins a run."""
        import wandb

        return wandb.init(**{"project": run, **self.options})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Stores the settings; those of a run that is gone on with may change."""
        import wandb

        wandb.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes values of any kind that wandb takes."""
        self.native.log(dict(values), step=step, **options)

    def log_images(self, values: Images, step: int | None = None, **options: object) -> None:
        """Writes lists of images by name; `options` are those of `wandb.Image`."""
        import wandb

        for name, images in values.items():
            self.log({name: [wandb.Image(image, **options) for image in images]}, step)

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
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **options)

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
            self.native.finish(exit_code=1)


TRACKER = WandbTracker
