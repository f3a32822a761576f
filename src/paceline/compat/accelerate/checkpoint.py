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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import CompatError
from paceline.base.log import logger, warn_once
from paceline.checkpoint.files import NUMPY_ARRAYS, load_object, save_object, writing
from paceline.compat.accelerate.checkpoint_functions import (
    agreed_by_writers,
    file_name,
    random_streams,
    set_random_streams,
    weights_file,
    write_states,
)
from paceline.compat.accelerate.errors import CheckpointValueError, CompatTypeError, MissingCheckpoint
from paceline.compat.accelerate.wrapping import without_repeated

if TYPE_CHECKING:
    from paceline.compat.accelerate.accelerator import Accelerator

_LOADERS = "paceline_loaders"


class Folder:
    """Saves and loads one accelerator.

    Args:
        accelerator: of the compat layer.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def _engines(self) -> list[Any]:
        """DeepSpeed's engines of the accelerator, which save and load themselves."""
        deepspeed = self._accelerator.deepspeed
        return [] if deepspeed is None else deepspeed.engines

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
        if not self._accelerator.states.writes:
            return Path(output_dir or "checkpoint")
        accelerator = self._accelerator
        target, partial = agreed_by_writers(accelerator, lambda: self._places(output_dir))
        engines = self._engines
        # Under such a plan no rank has all that accelerate's files hold. DeepSpeed's engines save themselves.
        if not engines and accelerator.plan.layout.size("shard", "tp", "pp") > 1:
            accelerator.states.save(target)
            self._count_up(target)
            return Path(target)
        agreed_by_writers(accelerator, lambda: self._make(partial))
        models = [entry.module for entry in accelerator.run.prepared.models]
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
        for hook in accelerator.states.hooks("save"):
            hook([*engines, *models], weights, partial)
        for number, engine in enumerate(engines):
            engine.save_checkpoint(partial, _tag(number))
        # A script may name a folder of its own on each rank, as accelerate allows: rank 0's gets the model, and the random
        # streams of the ranks that named the same one.
        own_folder = target if output_dir is None or self._automatic else str(Path(output_dir))
        from_ranks = accelerator.collectives.gather_object((own_folder, self._streams()))
        main_folder = from_ranks[0][0]
        streams_in_main: dict[int, Any] = {}
        for rank, (folder, streams) in enumerate(from_ranks):
            if folder == main_folder:
                streams_in_main[rank] = streams
        agreed_by_writers(accelerator, lambda: self._write(Path(partial), Path(target), weights, streams_in_main, safe))
        if own_folder != main_folder:
            self._write_apart(Path(own_folder))
        self._count_up(target)
        return Path(own_folder)

    def _write_apart(self, folder: Path) -> None:
        """Random streams alone, where a script names another folder on this rank than on rank 0, as accelerate does."""
        rank = self._accelerator.process_index
        logger("compat").warning(
            "rank %d saves into %s, and rank 0 elsewhere: the model is in rank 0's folder, which all ranks load",
            rank,
            folder,
        )
        save_object(self._streams(), folder / f"random_states_{rank}.pkl")

    def _count_up(self, folder: str | Path) -> None:
        """Automatic names go on after this folder's number."""
        if self._automatic:
            self._accelerator.project_configuration.iteration = _number(folder) + 1

    @property
    def _automatic(self) -> bool:
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    @property
    def _root(self) -> Path:
        """Where automatically named folders lie.

        Raises:
            CheckpointValueError: `checkpoint-unnamed`, where the script names neither a folder nor a place for them.
        """
        if self._accelerator.project_dir is None or not self._automatic:
            raise CheckpointValueError(
                "checkpoint-unnamed",
                "no folder was named, and automatic checkpoint naming is disabled.",
                why=f"project_dir={self._accelerator.project_dir!r}, automatic_checkpoint_naming={self._automatic}",
                fix="name a folder, or pass ProjectConfiguration('runs/mine', automatic_checkpoint_naming=True)",
            )
        return Path(self._accelerator.project_dir) / "checkpoints"

    def _places(self, output_dir: str | Path | None) -> tuple[str, str]:
        """Where the folder will be, and where it lies until it is whole."""
        if output_dir is not None and not self._automatic:
            target = Path(output_dir).absolute()
        else:
            # After those that are there: a run that was started again, or loaded an older one, overwrites nothing.
            free_numbers = [_number(path) + 1 for path in _numbered(self._root)]
            number = max([self._accelerator.project_configuration.iteration, *free_numbers])
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
        limit = self._accelerator.project_configuration.total_limit
        if self._automatic and limit is not None:
            for path in _numbered(self._root)[: -max(1, limit)]:
                shutil.rmtree(path)

    def _write_files(self, folder: Path, weights: list[Any], safe: bool | None) -> None:
        prepared = self._accelerator.run.prepared
        for number, state in enumerate(weights):
            if safe is not False:
                tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
                save_object(without_repeated(tensors), folder / file_name("model", number, "safetensors"), True)
            if safe is not True:
                save_object(state, folder / file_name("pytorch_model", number, "bin"))
        write_states(folder, prepared.optimizers, prepared.schedulers, prepared.loaders, self._accelerator.scaler)
        for number, custom_object in enumerate(self._accelerator._custom_objects):
            save_object(custom_object.state_dict(), folder / f"custom_checkpoint_{number}.pkl")

    def _streams(self) -> dict[str, Any]:
        """This rank's random streams, and what accelerate keeps beside them."""
        positions = [loader.state_dict() for loader in self._accelerator.run.prepared.loaders]
        return {**random_streams(self._accelerator.step, self._accelerator.device.type), _LOADERS: positions}

    # -- load ------------------------------------------------------------------------------------------------

    def load(
        self, input_dir: str | Path | None, *, strict: bool = True, map_location: str | None = None, **others: object
    ) -> None:
        """Puts back what a folder holds.

        Args:
            input_dir: the folder; None takes the automatically named one with the highest number.
            strict: whether names of weights must be the same.
            map_location: None, "cpu" or "on_device"; states go to the devices of their parameters in each case.
            others: how accelerate has a model's file read; no effect here.

        Ranks: all; at another number of processes too, with new random streams for those that had none.

        Raises:
            CheckpointError: before anything is touched where that can be known; CompatError: `compat-checkpoint`.
            CompatTypeError: `compat-argument`, for another `map_location`.
        """
        if map_location not in (None, "cpu", "on_device"):
            raise CompatTypeError(
                "compat-argument",
                f"Unsupported optimizer map location passed: {map_location!r}.",
                why="states are read on the CPU, and go to the device of their parameters",
                fix="leave map_location out, or choose 'cpu' or 'on_device'",
            )
        folder = Path(input_dir) if input_dir is not None else self._newest()
        if (folder / "manifest.json").is_file():  # of a native `save_state`
            self._accelerator.states.load(str(folder))
            return
        models = [entry.module for entry in self._accelerator.run.prepared.models]
        still_to_load = [*self._engines, *models]
        for hook in self._accelerator.states.hooks("load"):
            hook(still_to_load, str(folder))
        # What a hook has taken out of the list it has loaded itself.
        models = [model for model in models if model in still_to_load]
        engines = [engine for engine in self._engines if engine in still_to_load]
        self._check(folder, models)
        for number, engine in enumerate(engines):
            engine.load_checkpoint(folder, _tag(number), load_module_strict=strict)
        from paceline.checkpoint.weights.model import load_model  # takes half a second: not before it is needed

        for number, model in enumerate(models):
            load_model(model, weights_file(folder, number), strict=strict)
        prepared = self._accelerator.run.prepared
        for number, optimizer in enumerate(prepared.optimizers):
            optimizer.load_state_dict(load_object(folder / file_name("optimizer", number, "bin")))
        for number, scheduler in enumerate(prepared.schedulers):
            scheduler.load_state_dict(load_object(folder / file_name("scheduler", number, "bin")))
        if self._accelerator.scaler is not None and (folder / "scaler.pt").is_file():
            self._accelerator.scaler.load_state_dict(load_object(folder / "scaler.pt"))
        for number, custom_object in enumerate(self._accelerator._custom_objects):
            custom_object.load_state_dict(load_object(folder / f"custom_checkpoint_{number}.pkl"))
        self._load_streams(folder)
        if input_dir is None:
            self._count_up(folder)

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
        """That the folder holds what was prepared, and as many objects as were registered."""
        if not folder.is_dir():
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"the folder {folder} does not exist.",
                why="load_state tried to find it",
                fix="check the path",
            )
        names = os.listdir(folder)
        other_names = [name for name in names if not name.startswith("random_states_")]
        if names and not other_names and "random_states_0.pkl" not in names:
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"{folder} holds random streams alone.",
                why="when it was saved, this rank named another folder than rank 0, where the model is",
                fix="name rank 0's folder on every rank",
            )
        prepared = self._accelerator.run.prepared
        custom_objects = self._accelerator._custom_objects
        # A model's weights may lie in both formats: "model_1.safetensors" and "pytorch_model_1.bin" are one model's.
        weight_files = [name for name in names if _MODEL.fullmatch(name)]
        saved_models = {name.removeprefix("pytorch_").partition(".")[0] for name in weight_files}
        # Kind -> how many this run has, and how many the folder holds.
        numbers = {
            "models": (len(models), len(saved_models)),
            "optimizers": (len(prepared.optimizers), _count(names, r"optimizer(_\d+)?\.bin")),
            "schedulers": (len(prepared.schedulers), _count(names, r"scheduler(_\d+)?\.bin")),
            "registered objects": (len(custom_objects), _count(names, r"custom_checkpoint_\d+\.pkl")),
        }
        wrong = []
        for kind, (num_here, num_saved) in numbers.items():
            counts = f"{kind}: {num_here} here, {num_saved} in the folder"
            if num_here > num_saved or (kind == "registered objects" and num_here != num_saved):
                wrong.append(counts)
            elif num_here < num_saved:
                # A script that evaluates prepares the model alone, and reads the folder of the training.
                warn_once(
                    "compat",
                    f"{folder} was saved by a run that prepared more, of which the first are loaded: {counts}.",
                )
        if wrong:
            raise CompatError(
                "compat-checkpoint",
                f"{folder} was saved by a run that prepared other things.",
                why=wrong,
                fix="prepare and register the same things in the same order before `load_state`",
            )

    def _load_streams(self, folder: Path) -> None:
        rank = self._accelerator.process_index
        own_file = folder / f"random_states_{rank}.pkl"
        first_file = folder / "random_states_0.pkl"
        if not first_file.is_file():
            warn_once("compat", f"{folder} holds no random streams: those of this run go on.")
            return
        # The step and the positions of loaders are the same on all ranks: a rank that is new takes them from rank 0.
        file = own_file if own_file.is_file() else first_file
        with torch.serialization.safe_globals(NUMPY_ARRAYS):
            streams = load_object(file)
        self._accelerator.step = streams.get("step", 0)
        self._load_positions(folder, streams.get(_LOADERS))
        if not own_file.is_file():
            logger("compat").warning(
                "%s was saved by fewer processes: rank %d goes on with its own random streams", folder, rank
            )
            return
        set_random_streams(streams, self._accelerator.device.type)

    def _load_positions(self, folder: Path, states: list[Any] | None) -> None:
        """Epochs of the loaders, so that their order goes on; and the place within, for a stateful loader alone.

        Otherwise the script skips the batches that it has seen, as under accelerate.
        """
        for number, loader in enumerate(self._accelerator.run.prepared.loaders):
            path = folder / file_name("dl_state_dict", number, "bin")
            if self._accelerator.use_stateful_dataloader and path.is_file():
                state = load_object(path)
                if "samples" in state:
                    loader.load_state_dict(state)
                    continue
                warn_once("compat", f"{path} holds a position that only accelerate can read: use skip_first_batches.")
            if states is not None and number < len(states):
                loader.load_state_dict({**states[number], "samples": 0})


_MODEL = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)")


def _tag(number: int) -> str:
    """The folder of an engine within a checkpoint."""
    return "pytorch_model" if number == 0 else f"pytorch_model_{number}"


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
