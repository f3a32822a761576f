"""`Keeping`: the part of the facade that speaks of files: states, models, objects. Like all of it, it only delegates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.checkpoint.files import save_object
from paceline.config.keywords import checked_keywords
from paceline.plan.plan import Plan
from paceline.states import Hook, Start, States
from paceline.world.participant import Participant

if TYPE_CHECKING:
    from paceline.preparation import Preparation


@checked_keywords
class Keeping(Participant):
    """Saves and loads what an `Accelerator` holds."""

    plan: Plan
    _prepared: Preparation
    _states: States
    unwrap_model: Callable[..., nn.Module]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state of a model, whatever the plan. Ranks: all; all get it."""
        return self._prepared.state_dict(model, self.unwrap_model(model) if unwrap else model)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Writes an object beside `f` and renames it, on the main process only."""
        if self.is_main_process and self._states.writes:
            save_object(obj, str(f), safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model under Hugging Face's file names, in files of at most `max_shard_size`, whatever the plan.

        Tensors come together row by row on the ranks that write: no rank ever holds the whole model for it.

        Ranks: all.

        Raises:
            CheckpointError: on every rank; what was saved in the folder before is whole.
        """
        if not self._states.writes:
            return
        from paceline.checkpoint.weights import model as files  # takes half a second: not before it is needed

        files.save_model(
            self.unwrap_model(model), save_directory, max_shard_size, safe_serialization, **self._whole_of(model)
        )

    def load_model(self, model: nn.Module, directory: str | Path, *, strict: bool = True) -> None:
        """Reads weights into a model, whatever the plan; each rank reads its part alone.

        Args:
            model: prepared, or not yet; on the meta device too.
            directory: a folder that `save_model`, a Hugging Face library, `save_state` or torch's distributed checkpoint
                wrote, or one file of weights (safetensors, or `torch.save`).
            strict: whether the names must be the same; shapes must always be.

        Ranks: all.

        Raises:
            CheckpointError: `checkpoint-other-model` with what is missing, unexpected or misshapen; nothing was touched.
        """
        from paceline.checkpoint.weights import model as files

        files.load_model(self.unwrap_model(model), directory, strict=strict, **self._whole_of(model, ("peers", "tied")))

    def _whole_of(self, model: nn.Module, wanted: Sequence[str] = ("peers", "order", "tied")) -> dict[str, Any]:
        """What the files of a model need to know of the ranks that hold it together."""
        prepared = self._prepared.find(model)
        found = {
            "peers": self.collectives,
            "order": prepared.names if prepared else (),
            "tied": prepared.tied if prepared else {},
        }
        return {key: found[key] for key in wanted}

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to what `save_state` saves."""
        self._states.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Hook:
        """Calls `hook(models, weights, output_dir)` before each save; the handle has `remove()`."""
        return self._states.add_hook("save", hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Hook:
        """Calls `hook(models, input_dir)` before each load; returns a handle with `remove()`."""
        return self._states.add_hook("load", hook)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        *,
        background: bool = False,
        busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
    ) -> str | None:
        """Saves everything that a resume needs: models, optimizers, schedulers, loaders, scaler, RNG, counters, objects.

        Args:
            output_dir: a folder or a URI; None names it `<project_dir>/checkpoints/checkpoint_<n>`.
            background: returns as soon as the state is copied to the host's memory; the files are written meanwhile.
            busy: where an earlier save is being written still: "wait" for its end, or "skip" this one.
            metrics: kept in the manifest; what `Keep(best=...)` compares.

        Returns the folder; None where the save was skipped.

        Ranks: all. The folder is written beside and renamed: a crash leaves the old one or none.

        Raises:
            CheckpointError: nothing that was saved before is lost. An error of a background save is raised by the next
                call that saves, loads, waits or ends.
        """
        folder = None if output_dir is None else str(output_dir)
        return self._states.save(folder, self.plan, background=background, busy=busy, metrics=metrics)

    def wait_for_save(self) -> None:
        """Returns once no save is under way. Ranks: all. Raises what the background save raised."""
        self._states.wait()

    def resume(self) -> Start:
        """Goes on where the run stopped: loads what the setting `resume` says, once everything has been prepared.

        `resume` (`--resume`, PACELINE_RESUME) is "auto" unless said otherwise: the newest checkpoint in
        `<project_dir>/checkpoints` that verifies, if there is one. From here on SIGTERM lets the batch at hand end, saves,
        and leaves with exit code 75 (`paceline.base.exits.PREEMPTED`); so does Ctrl-C, with exit code 130.

        Returns where to go on; of a run that begins, epoch 0 and step 0.

        Ranks: all.

        Example:
            >>> start = accelerator.resume()
            >>> for epoch in range(start.epoch, 10):
            ...     for batch in loader: ...
        """
        return self._states.resume()

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> None:
        """Puts back what `save_state` saved, at any width; None takes the newest automatically named one. Ranks: all.

        With `strict=False` what only one side has is left out; shapes must agree always.
        """
        self._states.load(None if input_dir is None else str(input_dir), strict)
