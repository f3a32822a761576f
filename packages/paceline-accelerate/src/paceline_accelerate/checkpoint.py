"""Reads and writes accelerate's checkpoint folder.

    model.safetensors, pytorch_model.bin      weights of the first model (model_1..., pytorch_model_1... of the next)
    optimizer.bin, scheduler.bin              states of the first ones; optimizer_1.bin, ... of the next
    scaler.pt, dl_state_dict.bin              the loss scale; positions of loaders, with `use_stateful_dataloader`
    custom_checkpoint_0.pkl                   registered objects
    pytorch_model/                            what DeepSpeed's engine saves (pytorch_model_1/ for the next engine)
    random_states_0.pkl                       one file a rank: random streams, the step, positions of the loaders, and who has
                                              saved it; the last two are not accelerate's

Older scripts read `pytorch_model.bin` and newer ones `model.safetensors`, so a script that does not say which it wants gets
both; `safe_serialization=True` or `False` writes one of them. Rank 0 writes all files but the random streams of other ranks
into a temporary folder, which is moved into place when it is complete. Under a plan that shards models the folder is that of
the native `save_state`, which any number of processes can load.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import CheckpointError, Problem
from paceline.base.log import logger, warn_once
from paceline.checkpoint import retention
from paceline.checkpoint.files import load_object, save_object, writing
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.ownership import Author, Ownership
from paceline.checkpoint.store import Store, claim, discard
from paceline.checkpoint.store.claim import NameTakenError
from paceline.checkpoint.store.local import STORE
from paceline_accelerate.checkpoint_functions import (
    agreed_by_writers,
    file_name,
    load_custom_state,
    random_streams,
    set_random_streams,
    weights_file,
    write_states,
)
from paceline_accelerate.errors import (
    CheckpointValueError,
    CompatTypeError,
    CompatValueError,
    MissingCheckpoint,
    MissingParts,
)
from paceline_accelerate.rank_logger import get_logger
from paceline_accelerate.surroundings import load, writes_files
from paceline_accelerate.wrapping import without_repeated

if TYPE_CHECKING:
    from paceline_accelerate.accelerator_base import AcceleratorBase
    from paceline_deepspeed.engine import DeepSpeedEngine

_COME_S = 2.0  # how long a rank waits until rank 0 begins to save
_SAVE_S = 600.0  # and how long it waits until rank 0 has saved
# Our own keys in the files of random streams; accelerate ignores them.
_LOADERS = "paceline_loaders"
_AUTHOR = "paceline_author"


@dataclass(frozen=True)
class _StreamsAuthor:
    """Who has saved a folder, as `random_states_0.pkl` says it. Folders of accelerate say nothing.

    Attributes:
        runs: the random names of the run, and of the runs that it goes on from.
        writer: the process that has saved it, as `claim.record` describes it.
    """

    runs: list[str] = field(default_factory=list)
    writer: dict[str, str] = field(default_factory=dict)


def _author_of(store: Store, folder: str) -> Author | None:
    """Returns who has saved a folder, also one of the native format; None if its files cannot be read."""
    manifest = Manifest.find(store, folder)
    if manifest is not None:
        return manifest
    try:
        streams = load(os.path.join(folder, "random_states_0.pkl"))
    except CheckpointError:
        return None
    record = streams.get(_AUTHOR, {})
    return _StreamsAuthor(record.get("runs", []), record.get("writer", {}))


class Folder:
    """Saves and loads the checkpoints of one accelerator.

    Args:
        accelerator: the accelerator of the compat layer.

    Attributes:
        custom_objects: what the script has registered.
    """

    def __init__(self, accelerator: AcceleratorBase) -> None:
        self._accelerator = accelerator
        self._ownership = Ownership(_author_of)
        self.custom_objects: list[Any] = []

    def register(self, objects: Sequence[Any]) -> None:
        """Adds objects to the checkpoints.

        Raises:
            CompatValueError: `compat-argument`, if some cannot be saved; none is added then.
        """
        wrong = []
        for number, value in enumerate(objects):
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                wrong.append(f"Item at index {number} is a `{type(value).__name__}`, which lacks one of them")
        if wrong:
            raise CompatValueError(
                "compat-argument",
                "all objects must include a `state_dict` and a `load_state_dict` function to be saved.",
                why=wrong,
                fix="give its class both, or leave it out",
            )
        self.custom_objects.extend(objects)

    @property
    def _engines(self) -> list[DeepSpeedEngine]:
        """DeepSpeed's engines of the accelerator, which save and load themselves."""
        deepspeed = self._accelerator.deepspeed
        if deepspeed is None:
            return []
        return deepspeed.engines

    # -- save ------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | Path | None, safe: bool | None) -> Path:
        """Writes a checkpoint folder; files that are already in it and that this does not write stay.

        Args:
            output_dir: the folder; ignored with automatic names, which are `<project_dir>/checkpoints/checkpoint_<n>`.
            safe: safetensors (True), torch's format (False), or both (None).

        Ranks: all call it; each gets the path. Rank 0 may call it alone, if it names the folder and no model is divided.

        Raises:
            CheckpointError: what was saved before is unchanged. With automatic names every rank raises it.
        """
        if not self._accelerator.states.writes:
            return Path(output_dir or "checkpoint")
        accelerator = self._accelerator
        engines = self._engines
        is_divided = not engines and accelerator.plan.layout.size("shard", "tp", "pp") > 1
        if output_dir is not None and not (self._automatic or engines or is_divided):
            self._save_by_rank(Path(output_dir).absolute(), safe)
            return Path(output_dir)
        # Under a plan that shards the model no rank has everything that accelerate's files hold, so the native format is
        # written. A DeepSpeed engine also shards, but it saves itself below.
        if is_divided:
            target = agreed_by_writers(accelerator, lambda: self._target(output_dir))
            get_logger("accelerate.accelerator").info("Saving current state to %s", target)
            accelerator.states.save(target)
            agreed_by_writers(accelerator, lambda: self._remove_surplus(target))
            self._count_up(target)
            return Path(target)

        def stage() -> tuple[str, str] | None:
            # With `save_on_each_node` the other hosts write into folders of the same name.
            return self._stage(output_dir) if accelerator.is_main_process else None

        target, staged = agreed_by_writers(accelerator, stage)
        get_logger("accelerate.accelerator").info("Saving current state to %s", target)
        agreed_by_writers(accelerator, lambda: _join_stage(staged))
        try:
            weights = self._weights_after_hooks(staged)
            for number, engine in enumerate(engines):
                engine.save_checkpoint(staged, _tag(number))
            streams = dict(enumerate(accelerator.collectives.gather_object(self._streams())))
            agreed_by_writers(accelerator, lambda: self._write(staged, target, weights, streams, safe))
        except BaseException:
            if writes_files(accelerator.project_configuration.save_on_each_node):
                discard(STORE, staged)
            raise
        self._count_up(target)
        return Path(target)

    def _weights_after_hooks(self, folder: str) -> list[Any]:
        """Returns the states of the models that are to be written, after the script's hooks have run."""
        accelerator = self._accelerator
        models = accelerator.preparation.models
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
        # A hook may save a model itself and remove its entry from `weights`, as accelerate allows: it has to run before the
        # files are written.
        for hook in accelerator.states.hooks("save"):
            hook([*self._engines, *models], weights, folder)
        return weights

    def _save_by_rank(self, target: Path, safe: bool | None) -> None:
        """Saves this rank's part and waits for no other rank, because diffusers' scripts save on the main process alone.

        The ranks may also name different folders, as accelerate allows. Then the model is in rank 0's.
        """
        get_logger("accelerate.accelerator").info("Saving current state to %s", target)
        if writes_files(self._accelerator.project_configuration.save_on_each_node):
            _, staged = self._stage(target)
            try:
                weights = self._weights_after_hooks(staged)
                streams = {self._accelerator.process_index: self._streams()}
                self._write(staged, str(target), weights, streams, safe)
            except BaseException:
                discard(STORE, staged)
                raise
        else:
            if self._accelerator.states.hooks("save"):
                _make(target)
            self._weights_after_hooks(str(target))
            self._add_streams(target)
        self._count_up(target)

    def _add_streams(self, target: Path) -> None:
        """Adds the random streams of a rank that writes nothing else."""
        begin = time.monotonic()
        # Rank 0 puts a new folder into place when it is complete. It should not find one there that holds streams alone, but
        # it may also save elsewhere.
        under_way = f".{glob.escape(target.name)}.partial-*"
        while not target.exists() and time.monotonic() - begin < _SAVE_S:
            if time.monotonic() - begin > _COME_S and not any(target.parent.glob(under_way)):
                break
            time.sleep(0.01)
        _make(target)
        save_object(self._streams(), target / f"random_states_{self._accelerator.process_index}.pkl")

    def _count_up(self, folder: str | Path) -> None:
        """Counts a checkpoint; automatic names go on after this folder's number."""
        configuration = self._accelerator.project_configuration
        if self._automatic:
            # The number may have jumped: it is above those of folders that were there (`_places`).
            configuration.iteration = _number(folder)
        configuration.iteration += 1

    @property
    def _automatic(self) -> bool:
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    @property
    def _root(self) -> Path:
        """The folder that contains the automatically named checkpoints.

        Raises:
            CheckpointValueError: `checkpoint-unnamed`, if the script names neither a folder nor a project for automatic names.
        """
        if self._accelerator.project_dir is None or not self._automatic:
            raise CheckpointValueError(
                "checkpoint-unnamed",
                "no folder was named, and automatic checkpoint naming is disabled.",
                why=f"project_dir={self._accelerator.project_dir!r}, automatic_checkpoint_naming={self._automatic}",
                fix="name a folder, or pass ProjectConfiguration('runs/mine', automatic_checkpoint_naming=True)",
            )
        return Path(self._accelerator.project_dir) / "checkpoints"

    def _target(self, output_dir: str | Path | None) -> str:
        """Returns the path of the checkpoint folder."""
        if output_dir is not None and not self._automatic:
            return str(output_dir)
        # The number is above those of existing folders, so that a run that was restarted, or that has loaded an older
        # checkpoint, overwrites nothing.
        iteration = self._accelerator.project_configuration.iteration
        return retention.following(STORE, str(self._root), iteration)

    def _stage(self, output_dir: str | Path | None) -> tuple[str, str]:
        """Returns the path of the checkpoint folder, and of the new folder in which it is written. Ranks: one."""
        target = self._target(output_dir)
        with writing(f"making {target}"):
            staged = ""
            while not staged:
                try:
                    staged = STORE.stage(os.path.abspath(target), fresh=self._automatic)
                except NameTakenError:  # another run saves into the same project, or was killed there
                    target = retention.following(STORE, str(self._root), _number(target) + 1)
            folder, name = os.path.split(os.path.abspath(target))

            def is_mine(other: str) -> bool:
                return other == name or (self._automatic and retention.PATTERN.fullmatch(other) is not None)

            STORE.recover(folder, is_mine, lambda _: None)
        return target, staged

    def _write(self, staged: str, target: str, weights: list[Any], streams: dict[int, Any], safe: bool | None) -> None:
        """Writes the whole folder on rank 0, moves it into place, and removes older ones above `total_limit`."""
        folder = Path(staged)
        self._write_files(folder, weights, safe)
        for rank, stream in streams.items():
            save_object(stream, folder / f"random_states_{rank}.pkl")
        with writing(f"saving the state to {target}"):
            STORE.merge(staged, os.path.abspath(target))
        self._remove_surplus(target)

    def _remove_surplus(self, target: str) -> None:
        """Removes the oldest automatically named folders of this run above `total_limit`, after `target` was saved."""
        limit = self._accelerator.project_configuration.total_limit
        if not self._automatic or limit is None:
            return
        root = os.path.abspath(self._root)
        own = self._ownership.own(root)
        own.add(os.path.abspath(target))
        removable = [path for path in _numbered(root) if path in own]
        # Old folders go only after the new one is complete, and the new one stays even with a limit of 0.
        num_kept = max(1, limit)
        for path in removable[:-num_kept]:
            retention.remove(STORE, path)
            own.discard(path)

    def _write_files(self, folder: Path, weights: list[Any], safe: bool | None) -> None:
        prepared = self._accelerator.run.prepared
        for number, state in enumerate(weights):
            if safe is not False:
                tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
                save_object(without_repeated(tensors), folder / file_name("model", number, "safetensors"), True)
            if safe is not True:
                save_object(state, folder / file_name("pytorch_model", number, "bin"))
        write_states(folder, prepared.optimizers, prepared.schedulers, prepared.loaders, self._accelerator.scaler)
        for number, custom_object in enumerate(self.custom_objects):
            save_object(custom_object.state_dict(), folder / f"custom_checkpoint_{number}.pkl")

    def _streams(self) -> dict[str, Any]:
        """Returns this rank's random streams and step, as accelerate saves them, the positions of loaders, and who saves."""
        positions = [loader.state_dict() for loader in self._accelerator.run.prepared.loaders]
        streams = random_streams(self._accelerator.step, self._accelerator.device.type)
        author: dict[str, Any] = {}
        if self._automatic:
            author = asdict(_StreamsAuthor(self._ownership.runs(os.path.abspath(self._root)), claim.record()))
        return {**streams, _LOADERS: positions, _AUTHOR: author}

    # -- load ------------------------------------------------------------------------------------------------

    def load(
        self, input_dir: str | Path | None, *, strict: bool = True, map_location: str | None = None, **others: object
    ) -> None:
        """Loads a checkpoint folder.

        Args:
            input_dir: the folder; None takes the automatically named one with the highest number.
            strict: whether the names of weights must match.
            map_location: None, "cpu" or "on_device"; in each case states go to the devices of their parameters.
            others: arguments with which accelerate reads a model's file; they have no effect here.

        Ranks: all call it. The number of processes may differ from that of the saved run: a rank for which the folder has no
            random streams goes on with its own.

        Raises:
            CheckpointError: before anything is changed, as far as the error can be known by then.
            MissingParts: `compat-checkpoint`.
            CompatTypeError: `compat-argument`, for another `map_location`.
        """
        if map_location not in (None, "cpu", "on_device"):
            raise CompatTypeError(
                "compat-argument",
                f"Unsupported optimizer map location passed: {map_location!r}.",
                why="states are read on the CPU, and go to the device of their parameters",
                fix="leave map_location out, or choose 'cpu' or 'on_device'",
            )
        if input_dir is None:
            folder = self._newest()
        else:
            folder = Path(input_dir)
        get_logger("accelerate.accelerator").info("Loading states from %s", folder)
        if (folder / "manifest.json").is_file():  # only the native `save_state` writes a manifest
            self._accelerator.states.load(str(folder))
            self._go_on_from(folder)
            if not self._accelerator.use_stateful_dataloader:
                for loader in self._accelerator.run.prepared.loaders:
                    _begin_epoch_anew(loader, loader.state_dict())
            return
        models = self._accelerator.preparation.models
        still_to_load = [*self._engines, *models]
        for hook in self._accelerator.states.hooks("load"):
            hook(still_to_load, str(folder))
        # A hook that loads a model itself removes it from the list: that is accelerate's convention.
        models = [model for model in models if model in still_to_load]
        engines = [engine for engine in self._engines if engine in still_to_load]
        self._check(folder, models)
        for number, engine in enumerate(engines):
            engine.load_checkpoint(folder, _tag(number), load_module_strict=strict)
        from paceline.checkpoint.weights.model import load_model  # imported here because it takes half a second

        for number, model in enumerate(models):
            load_model(model, weights_file(folder, number), strict=strict)
        prepared = self._accelerator.run.prepared
        for number, optimizer in enumerate(prepared.optimizers):
            optimizer.load_state_dict(load_object(folder / file_name("optimizer", number, "bin")))
        for number, scheduler in enumerate(prepared.schedulers):
            scheduler.load_state_dict(load_object(folder / file_name("scheduler", number, "bin")))
        if self._accelerator.scaler is not None and (folder / "scaler.pt").is_file():
            self._accelerator.scaler.load_state_dict(load_object(folder / "scaler.pt"))
        for number, custom_object in enumerate(self.custom_objects):
            load_custom_state(custom_object, folder, number)
        self._load_streams(folder)
        self._go_on_from(folder)
        if input_dir is None:
            # Automatic names go on after this folder, or at the higher number that the script has chosen.
            configuration = self._accelerator.project_configuration
            configuration.iteration = max(configuration.iteration, _number(folder) + 1)

    def _go_on_from(self, folder: Path) -> None:
        """Counts what the run of a loaded folder has saved beside it as this run's own."""
        if self._automatic and writes_files(self._accelerator.project_configuration.save_on_each_node):
            self._ownership.go_on(STORE, os.path.abspath(folder))

    def _newest(self) -> Path:
        folders = _numbered(self._root)
        if not folders:
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"there is no checkpoint in {self._root}.",
                why="load_state() without a folder takes the one with the highest number",
                fix="save one with `save_state()`, or name the folder",
            )
        return Path(folders[-1])

    def _check(self, folder: Path, models: list[nn.Module]) -> None:
        """Checks that the folder holds everything that was prepared, and as many objects as were registered."""
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
        # A model's weights may be there in both formats: "model_1.safetensors" and "pytorch_model_1.bin" count as one model.
        weight_files = [name for name in names if _MODEL.fullmatch(name)]
        saved_models = {name.removeprefix("pytorch_").partition(".")[0] for name in weight_files}
        # Kind -> (number in this run, number in the folder).
        numbers = {
            "models": (len(models), len(saved_models)),
            "optimizers": (len(prepared.optimizers), _count(names, r"optimizer(_\d+)?\.bin")),
            "schedulers": (len(prepared.schedulers), _count(names, r"scheduler(_\d+)?\.bin")),
            "registered objects": (len(self.custom_objects), _count(names, r"custom_checkpoint_\d+\.pkl")),
        }
        wrong = []
        for kind, (num_here, num_saved) in numbers.items():
            counts = f"{kind}: {num_here} here, {num_saved} in the folder"
            # As under accelerate, the number of registered objects has to be the very same.
            if num_here > num_saved or (kind == "registered objects" and num_here != num_saved):
                wrong.append(counts)
            elif num_here < num_saved:
                # This is no error: an evaluation script prepares only the model, and loads the folder of the training run.
                warn_once(
                    "compat",
                    f"{folder} was saved by a run that prepared more, of which the first are loaded: {counts}.",
                )
        if wrong:
            what = f"{folder} was saved by a run that prepared other things."
            fix = "prepare and register the same things in the same order before `load_state`"
            raise MissingParts.of([Problem("compat-checkpoint", what, why=wrong, fix=fix)])

    def _load_streams(self, folder: Path) -> None:
        rank = self._accelerator.process_index
        own_file = folder / f"random_states_{rank}.pkl"
        first_file = folder / "random_states_0.pkl"
        if not first_file.is_file():
            warn_once("compat", f"{folder} holds no random streams: those of this run go on.")
            return
        # The step and the positions of loaders are equal on all ranks, so a rank that the saved run did not have takes them
        # from rank 0's file. Random streams differ by rank and must not be shared.
        has_own_file = own_file.is_file()
        streams = load(own_file if has_own_file else first_file)
        self._accelerator.step = streams.get("step", 0)
        self._load_positions(folder, streams.get(_LOADERS))
        if not has_own_file:
            logger("compat").warning(
                "%s holds no random streams of rank %d, which did not save: it goes on with its own", folder, rank
            )
            return
        set_random_streams(streams, self._accelerator.device.type)

    def _load_positions(self, folder: Path, states: list[Any] | None) -> None:
        """Sets the epoch of each loader, so that the order of samples goes on, and for a stateful loader also its position.

        With other loaders the script itself skips the batches that it has seen, as under accelerate.
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
                _begin_epoch_anew(loader, states[number])


def _begin_epoch_anew(loader: Any, state: Mapping[str, Any]) -> None:
    """Sets a loader to the start of the epoch of a state: from within it, a loop that skips nothing would miss batches."""
    # A feed with as many processes as before goes by "batches", and any other one by "samples".
    loader.load_state_dict({**state, "samples": 0, "batches": 0})


_MODEL = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)")


def _tag(number: int) -> str:
    """Returns the name of an engine's folder within a checkpoint."""
    if number == 0:
        return "pytorch_model"
    return f"pytorch_model_{number}"


def _number(path: str | Path) -> int:
    return int(str(path).rpartition("_")[2])


def _numbered(root: str | Path) -> list[str]:
    """Returns the automatically named checkpoints in the order of their numbers."""
    return list(retention.numbered(STORE, str(root)).values())


def _make(folder: Path) -> None:
    with writing(f"making {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def _join_stage(staged: str) -> None:
    with writing(f"making {staged}"):
        STORE.join_stage(staged)


def _count(names: list[str], pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in names)
