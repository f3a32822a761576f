"""accelerate's checkpoint folder, read and written.

    model.safetensors, pytorch_model.bin      weights of the first model (model_1..., pytorch_model_1... of the next)
    optimizer.bin, scheduler.bin              of the first; optimizer_1.bin, ... of the next
    scaler.pt, dl_state_dict.bin              the loss scale; positions of loaders, with `use_stateful_dataloader`
    custom_checkpoint_0.pkl                   registered objects
    pytorch_model/                            of DeepSpeed's engine (pytorch_model_1/ of the next), as the engine saves it
    random_states_0.pkl                       of each rank: random streams, the step, and (ours) epochs of the loaders

Scripts of accelerate's early days read `pytorch_model.bin`, later ones `model.safetensors`: a script that does not say
which it wants gets both. `safe_serialization=True` or `False` writes one. All files are written beside and moved into
place together; rank 0 writes, because it can be told of by one error that all ranks raise. Under a plan that divides
models the folder is one of the native `save_state`, which any number of processes can load.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base.errors import CompatError
from paceline.base.log import logger, warn_once
from paceline.checkpoint.files import NUMPY_ARRAYS, load_object, save_object, writing
from paceline.compat.accelerate.checkpoint_functions import (
    file_name,
    random_streams,
    set_random_streams,
    weights_file,
    write_states,
)
from paceline.compat.accelerate.errors import CheckpointValueError, MissingCheckpoint
from paceline.compat.accelerate.wrapping import without_repeated

_LOADERS = "paceline_loaders"


class Folder:
    """Saves and loads one accelerator.

    Args:
        accelerator: of the compat layer.
    """

    def __init__(self, accelerator: Any) -> None:
        self._of = accelerator

    # -- save ------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | Path | None, safe: bool | None) -> Path:
        """Writes a folder; files of others in it stay.

        Args:
            output_dir: the folder; ignored with automatic names, `<project_dir>/checkpoints/checkpoint_<n>`.
            safe: safetensors (True), torch's format (False), or both (None).

        Ranks: all; each gets the path.

        Raises:
            CheckpointError: on every rank; what was saved before is untouched.
        """
        if not self._of.states.writes:
            return Path(output_dir or "checkpoint")
        target, partial = self._agree(lambda: self._places(output_dir))
        engines = self._of._engines
        # Without DeepSpeed's engines, which save themselves: no rank has all that the files below hold.
        if not engines and self._of.plan.layout.size("shard", "tp", "pp") > 1:
            self._of.states.save(target)
            self._next(target)
            return Path(target)
        self._agree(lambda: self._make(partial))
        models = [entry.module for entry in self._of.run.prepared.models]
        weights = [self._of.get_state_dict(model, unwrap=False) for model in models]
        for hook in self._of.states.hooks("save"):
            hook([*engines, *models], weights, partial)
        for number, engine in enumerate(engines):
            engine.save_checkpoint(partial, _tag(number))
        own_folder = target if output_dir is None or self._automatic else str(Path(output_dir))
        folders, streams = zip(*self._of.collectives.gather_object((own_folder, self._streams())), strict=True)
        shared = {rank: stream for rank, stream in enumerate(streams) if folders[rank] == folders[0]}
        self._agree(lambda: self._write(Path(partial), Path(target), weights, shared, safe))
        if own_folder != folders[0]:
            self._write_apart(Path(own_folder))
        self._next(target)
        return Path(own_folder)

    def _write_apart(self, folder: Path) -> None:
        """Random streams alone, where a script names another folder on this rank than on rank 0, as accelerate does."""
        rank = self._of.process_index
        logger("compat").warning(
            "rank %d saves into %s, and rank 0 elsewhere: the model is in rank 0's folder, which all ranks load",
            rank,
            folder,
        )
        save_object(self._streams(), folder / f"random_states_{rank}.pkl")

    def _next(self, folder: str | Path) -> None:
        if self._automatic:
            self._of.project_configuration.iteration = _number(folder) + 1

    @property
    def _automatic(self) -> bool:
        return bool(self._of.project_configuration.automatic_checkpoint_naming)

    @property
    def _root(self) -> Path:
        if self._of.project_dir is None or not self._automatic:
            raise CheckpointValueError(
                "checkpoint-unnamed",
                "no folder was named, and there is none for automatic names.",
                why=f"project_dir={self._of.project_dir!r}, automatic_checkpoint_naming={self._automatic}",
                fix="name a folder, or pass ProjectConfiguration('runs/mine', automatic_checkpoint_naming=True)",
            )
        return Path(self._of.project_dir) / "checkpoints"

    def _places(self, output_dir: str | Path | None) -> tuple[str, str]:
        """Where the folder will be, and where it lies until it is whole."""
        if output_dir is not None and not self._automatic:
            target = Path(output_dir).absolute()
        else:
            # After those that are there: a run that was started again, or loaded an older one, overwrites nothing.
            free_numbers = [_number(path) + 1 for path in _numbered(self._root)]
            number = max([self._of.project_configuration.iteration, *free_numbers])
            target = self._root / f"checkpoint_{number}"
            output_dir = target
        return str(output_dir), str(target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}"))

    def _make(self, partial: str) -> None:
        with writing(f"making {partial}"):
            Path(partial).mkdir(parents=True, exist_ok=True)

    def _write(
        self, partial: Path, target: Path, weights: list[Any], streams: dict[int, Any], safe: bool | None
    ) -> None:
        """The whole folder, on rank 0."""
        try:
            self._write_files(partial, weights, safe)
            for rank, stream in streams.items():
                save_object(stream, partial / f"random_states_{rank}.pkl")
            with writing(f"saving the state to {target}"):
                _move(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        limit = self._of.project_configuration.total_limit
        if self._automatic and limit is not None:
            for path in _numbered(self._root)[: -max(1, limit)]:
                shutil.rmtree(path)

    def _write_files(self, folder: Path, weights: list[Any], safe: bool | None) -> None:
        prepared = self._of.run.prepared
        for number, state in enumerate(weights):
            if safe is not False:
                save_object(
                    without_repeated(_only_tensors(state)), folder / file_name("model", number, "safetensors"), True
                )
            if safe is not True:
                save_object(state, folder / file_name("pytorch_model", number, "bin"))
        write_states(folder, prepared.optimizers, prepared.schedulers, prepared.loaders, self._of.scaler)
        for number, thing in enumerate(self._of._custom_objects):
            save_object(thing.state_dict(), folder / f"custom_checkpoint_{number}.pkl")

    def _streams(self) -> dict[str, Any]:
        """This rank's random streams, and what accelerate keeps beside them."""
        positions = [loader.state_dict() for loader in self._of.run.prepared.loaders]
        return {**random_streams(self._of.step, self._of.device.type), _LOADERS: positions}

    # -- load ------------------------------------------------------------------------------------------------

    def load(self, input_dir: str | Path | None, *, strict: bool = True) -> None:
        """Puts back what a folder holds.

        Args:
            input_dir: the folder; None takes the automatically named one with the highest number.
            strict: whether names of weights must be the same.

        Ranks: all; at another number of processes too, with new random streams for those that had none.

        Raises:
            CheckpointError: before anything is touched where that can be known; CompatError: `compat-checkpoint`.
        """
        folder = Path(input_dir) if input_dir is not None else self._newest()
        if (folder / "manifest.json").is_file():  # of a native `save_state`
            self._of.states.load(str(folder))
            return
        models = [entry.module for entry in self._of.run.prepared.models]
        engines = self._of._engines
        shown = [*engines, *models]
        for hook in self._of.states.hooks("load"):
            hook(shown, str(folder))
        # What a hook has taken out of the list it has loaded itself.
        models = [model for model in models if model in shown]
        self._check(folder, models)
        for number, engine in enumerate(engine for engine in engines if engine in shown):
            engine.load_checkpoint(folder, _tag(number), load_module_strict=strict)
        from paceline.checkpoint.weights.model import load_model  # takes half a second: not before it is needed

        for number, model in enumerate(models):
            load_model(model, weights_file(folder, number), strict=strict)
        prepared = self._of.run.prepared
        for stem, things in (("optimizer", prepared.optimizers), ("scheduler", prepared.schedulers)):
            for number, thing in enumerate(things):
                thing.load_state_dict(load_object(folder / file_name(stem, number, "bin")))
        if self._of.scaler is not None and (folder / "scaler.pt").is_file():
            self._of.scaler.load_state_dict(load_object(folder / "scaler.pt"))
        for number, thing in enumerate(self._of._custom_objects):
            thing.load_state_dict(load_object(folder / f"custom_checkpoint_{number}.pkl"))
        self._load_streams(folder)
        if input_dir is None:
            self._next(folder)

    def _newest(self) -> Path:
        folders = _numbered(self._root)
        if not folders:
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"there is no checkpoint in {self._root}.",
                why="load_state() without a folder takes the one with the highest number",
                fix="save one with `save_state()`, or name the folder",
            )
        return folders[-1]

    def _check(self, folder: Path, models: list[nn.Module]) -> None:
        """That the folder holds as many things as were prepared and registered."""
        if not folder.is_dir():
            raise MissingCheckpoint(
                "checkpoint-missing", f"there is no folder {folder}.", why="load_state names it", fix="check the path"
            )
        names = os.listdir(folder)
        are_streams = [name.startswith("random_states_") for name in names]
        if names and all(are_streams) and "random_states_0.pkl" not in names:
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"{folder} holds random streams alone.",
                why="when it was saved, this rank named another folder than rank 0, where the model is",
                fix="name rank 0's folder on every rank",
            )
        prepared = self._of.run.prepared
        weights = {re.sub(r"^pytorch_", "", name).partition(".")[0] for name in names if _MODEL.fullmatch(name)}
        here = {
            "models": (len(models), len(weights)),
            "optimizers": (len(prepared.optimizers), _count(names, r"optimizer(_\d+)?\.bin")),
            "schedulers": (len(prepared.schedulers), _count(names, r"scheduler(_\d+)?\.bin")),
            "registered objects": (len(self._of._custom_objects), _count(names, r"custom_checkpoint_\d+\.pkl")),
        }
        wrong = [f"{kind}: {own} here, {there} in the folder" for kind, (own, there) in here.items() if own != there]
        if wrong:
            raise CompatError(
                "compat-checkpoint",
                f"{folder} was saved by a run that prepared other things.",
                why=wrong,
                fix="prepare and register the same things in the same order before `load_state`",
            )

    def _load_streams(self, folder: Path) -> None:
        rank = self._of.process_index
        own, first = folder / f"random_states_{rank}.pkl", folder / "random_states_0.pkl"
        if not first.is_file():
            warn_once("compat", f"{folder} holds no random streams: those of this run go on.")
            return
        with torch.serialization.safe_globals(NUMPY_ARRAYS):
            streams = load_object(own if own.is_file() else first)
        self._of.step = streams.get("step", 0)
        self._load_positions(folder, streams.get(_LOADERS))
        if not own.is_file():
            logger("compat").warning(
                "%s was saved by fewer processes: rank %d goes on with its own random streams", folder, rank
            )
            return
        set_random_streams(streams, self._of.device.type)

    def _load_positions(self, folder: Path, states: list[Any] | None) -> None:
        """Epochs of the loaders, so that their order goes on; and the place within, for a stateful loader alone.

        Otherwise the script skips the batches that it has seen, as under accelerate.
        """
        for number, loader in enumerate(self._of.run.prepared.loaders):
            path = folder / file_name("dl_state_dict", number, "bin")
            if self._of.use_stateful_dataloader and path.is_file():
                state = load_object(path)
                if "samples" in state:
                    loader.load_state_dict(state)
                    continue
                warn_once("compat", f"{path} holds a position that only accelerate can read: use skip_first_batches.")
            if states is not None and number < len(states):
                loader.load_state_dict({**states[number], "samples": 0})

    # -- together --------------------------------------------------------------------------------------------

    def _agree(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on the ranks that write and gives rank 0's value, or the first error, to all. Ranks: all."""
        error = value = None
        each_node = self._of.project_configuration.save_on_each_node and self._of.is_local_main_process
        if self._of.is_main_process or each_node:
            try:
                value = work()
            except Exception as caught:  # raised again below, on every rank
                error = caught
        outcomes = self._of.collectives.gather_object((error, value))
        for error, _ in outcomes:
            if error is not None:
                raise error
        return outcomes[0][1]


_MODEL = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)")


def _tag(number: int) -> str:
    """The folder of an engine within a checkpoint."""
    return "pytorch_model" if number == 0 else f"pytorch_model_{number}"


def _only_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _number(path: str | Path) -> int:
    return int(str(path).rpartition("_")[2])


def _numbered(root: Path) -> list[Path]:
    """Automatically named checkpoints, by number."""
    entries = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in entries if re.fullmatch(r"checkpoint_\d+", path.name)), key=_number)


def _count(names: list[str], pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in names)


def _move(partial: Path, target: Path) -> None:
    """Gives a finished folder its place; where there is one already, file by file."""
    if not target.exists():
        os.replace(partial, target)
        return
    for path in sorted(partial.rglob("*")):
        place = target / path.relative_to(partial)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.replace(path, place)
