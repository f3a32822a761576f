"""Saves and loads the folders of accelerate's `save_state`.

A save is one of `Checkpointer`'s, which claims a folder, moves it into place when it is complete, and removes older ones;
`checkpoint_writer` writes the files. Under a plan that shards models, and behind URLs, which accelerate itself does not
read, the files are those of the native `save_state`, which any number of processes can load.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.log import warn_once
from paceline.checkpoint import retention
from paceline.checkpoint.files import load_object, save_object, writing
from paceline.checkpoint.format.checkpoint_format import recover_one
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store import Store, store_for
from paceline_accelerate.checkpoint_functions import file_name
from paceline_accelerate.checkpoint_reader import read_folder
from paceline_accelerate.checkpoint_writer import LOADERS, streams_of, tag, weights_after_hooks, write_folder
from paceline_accelerate.errors import (
    CheckpointValueError,
    CompatTypeError,
    CompatValueError,
    MissingCheckpoint,
)
from paceline_accelerate.folder_names import STREAMS_OF_RANK_0
from paceline_accelerate.rank_logger import get_logger
from paceline_accelerate.surroundings import writes_files

if TYPE_CHECKING:
    from paceline_accelerate.accelerator_base import AcceleratorBase
    from paceline_deepspeed.engine import DeepSpeedEngine

_COME_S = 2.0  # how long a rank waits until rank 0 begins to save
_SAVE_S = 600.0  # and how long it waits until rank 0 has saved


class Folder:
    """Saves and loads the checkpoints of one accelerator.

    Args:
        accelerator: the accelerator of the compat layer.

    Attributes:
        custom_objects: what the script has registered.
    """

    def __init__(self, accelerator: AcceleratorBase) -> None:
        self._accelerator = accelerator
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

    @property
    def _is_divided(self) -> bool:
        """Whether no rank has all of a model that the accelerator itself prepared."""
        return not self._engines and self._accelerator.plan.layout.size("shard", "tp", "pp") > 1

    # -- save ------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | Path | None, safe: bool | None) -> Path | str:
        """Writes a checkpoint folder; files that are already in it and that this does not write stay.

        Args:
            output_dir: the folder or URL; ignored with automatic names, which are `<project_dir>/checkpoints/checkpoint_<n>`.
            safe: safetensors (True), torch's format (False), or both (None).

        Ranks: all call it; each gets the path. Rank 0 may call it alone, if it names a folder and no model is divided.

        Raises:
            CheckpointError: what was saved before is unchanged. With automatic names every rank raises it.
        """
        accelerator = self._accelerator
        states = accelerator.states
        if not states.writes:
            return Path(output_dir or "checkpoint")
        configuration = accelerator.project_configuration
        engines = self._engines
        store, place = self._place(output_dir)
        # Under a plan that shards the model no rank has everything that accelerate's files hold. A DeepSpeed engine also
        # shards, but it saves itself.
        is_native = "://" in place or self._is_divided
        alone = not (self._automatic or engines or is_native)
        if alone and not writes_files(configuration.save_on_each_node):
            self._add_part(Path(store.resolve(place)))
            configuration.iteration += 1
            return Path(place)
        writer = None
        if not is_native:
            writer = partial(write_folder, accelerator, engines, safe)
        saved = states.save(place, fresh=self._automatic, writer=writer, keep=self._keep, alone=alone)
        assert saved is not None, "it was not skipped"
        if self._automatic:
            # Another run may have taken the number.
            folder, _ = store.parent(place)
            place = store.join(folder, store.parent(saved)[1])
            configuration.iteration = _number(place)
        configuration.iteration += 1
        return place if "://" in place else Path(place)

    def _place(self, output_dir: str | Path | None) -> tuple[Store, str]:
        """Returns the path of the next checkpoint folder, and its store."""
        if output_dir is not None and not self._automatic:
            return store_for(output_dir), str(output_dir)
        # The number is above those of existing folders, so that a run that was restarted, or that has loaded an older
        # checkpoint, overwrites nothing.
        root = self._root
        store = store_for(root)
        return store, retention.following(store, root, self._accelerator.project_configuration.iteration)

    @property
    def _keep(self) -> Keep:
        """The rule of `total_limit`, which may change between two saves. The new one stays even with a limit of 0."""
        limit = self._accelerator.project_configuration.total_limit
        return Keep(last=max(1, limit)) if self._automatic and limit is not None else Keep()

    def _add_part(self, target: Path) -> None:
        """Adds the random streams of a rank that writes nothing else.

        It waits for no other rank, because diffusers' scripts save on the main process alone. The ranks may also name different
        folders, as accelerate allows. Then the model is in rank 0's.
        """
        accelerator = self._accelerator
        get_logger("accelerate.accelerator").info("Saving current state to %s", target)
        if accelerator.states.hooks("save"):
            _make(target)
        weights_after_hooks(accelerator, [], str(target))
        begin = time.monotonic()
        # Rank 0 puts a new folder into place when it is complete. It should not find one there that holds streams alone, but
        # it may also save elsewhere.
        under_way = f".{glob.escape(target.name)}.partial-*"
        while not target.exists() and time.monotonic() - begin < _SAVE_S:
            if time.monotonic() - begin > _COME_S and not any(target.parent.glob(under_way)):
                break
            time.sleep(0.01)
        _make(target)
        save_object(streams_of(accelerator), target / f"random_states_{accelerator.process_index}.pkl")

    @property
    def _automatic(self) -> bool:
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    @property
    def _root(self) -> str:
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
        project_dir = str(self._accelerator.project_dir)
        return store_for(project_dir).join(project_dir, retention.AUTOMATIC)

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
            random streams gets new ones, derived from those of rank 0.

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
        states = self._accelerator.states
        if not states.writes:
            return
        place = self._newest() if input_dir is None else str(input_dir)
        get_logger("accelerate.accelerator").info("Loading states from %s", place)
        store = store_for(place)
        home = store.resolve(place)
        with writing(f"finishing a save into {place}"):
            recover_one(store, home)
        if store.exists(store.join(home, "manifest.json")):  # only the native `save_state` writes a manifest
            states.load(place, strict)
            if not self._accelerator.use_stateful_dataloader:
                for loader in self._accelerator.run.prepared.loaders:
                    _begin_epoch_anew(loader, loader.state_dict())
            self._go_on_from(place, automatic=input_dir is None)
            return
        folder = Path(home)
        _check_present(folder)
        models = self._accelerator.preparation.models
        still_to_load = [*self._engines, *models]
        for hook in states.hooks("load"):
            hook(still_to_load, str(folder))
        # A hook that loads a model itself removes it from the list: that is accelerate's convention.
        models = [model for model in models if model in still_to_load]
        engines = [engine for engine in self._engines if engine in still_to_load]
        for number, engine in enumerate(engines):
            engine.load_checkpoint(folder, tag(number), load_module_strict=strict)
        streams: dict[str, Any] = {}
        reader = partial(read_folder, self._accelerator, models, streams)
        states.load(home, strict, reader=reader, alone=not self._is_divided)
        self._go_on_with(folder, streams)
        self._go_on_from(place, automatic=input_dir is None)

    def _go_on_from(self, place: str, automatic: bool) -> None:
        """Counts what the run of a loaded folder has saved beside it as this run's own, and goes on after its number."""
        if self._automatic:
            self._accelerator.states.go_on_from(place)
        if automatic:
            # Or at the higher number that the script has chosen.
            configuration = self._accelerator.project_configuration
            configuration.iteration = max(configuration.iteration, _number(place) + 1)

    def _newest(self) -> str:
        root = self._root
        folders = list(retention.numbered(store_for(root), root).values())
        if not folders:
            raise MissingCheckpoint(
                "checkpoint-missing",
                f"there is no checkpoint in {root}.",
                why="load_state() without a folder takes the one with the highest number",
                fix="save one with `save_state()`, or name the folder",
            )
        return folders[-1]

    def _go_on_with(self, folder: Path, streams: Mapping[str, Any]) -> None:
        """Takes the step and the epochs of loaders, which are equal on all ranks, from a file of random streams.

        A stateful loader gets its position, too. With others the script itself skips what it has seen, as under accelerate.
        """
        if not streams:
            warn_once("compat", f"{folder} holds no random streams: those of this run go on.")
            return
        self._accelerator.step = streams.get("step", 0)
        states = streams.get(LOADERS, [])
        for number, loader in enumerate(self._accelerator.run.prepared.loaders):
            path = folder / file_name("dl_state_dict", number, "bin")
            if self._accelerator.use_stateful_dataloader and path.is_file():
                state = load_object(path)
                if "samples" in state:
                    loader.load_state_dict(state)
                    continue
                warn_once("compat", f"{path} holds a position that only accelerate can read: use skip_first_batches.")
            if number < len(states):
                _begin_epoch_anew(loader, states[number])


def _begin_epoch_anew(loader: Any, state: Mapping[str, Any]) -> None:
    """Sets a loader to the start of the epoch of a state: from within it, a loop that skips nothing would miss batches."""
    # A feed with as many processes as before goes by "batches", and any other one by "samples".
    loader.load_state_dict({**state, "samples": 0, "batches": 0})


def _check_present(folder: Path) -> None:
    """Checks that the folder is there, and that it is rank 0's, where the ranks have named several."""
    if not folder.is_dir():
        raise MissingCheckpoint(
            "checkpoint-missing",
            f"the folder {folder} does not exist.",
            why="load_state tried to find it",
            fix="check the path",
        )
    names = os.listdir(folder)
    if names and STREAMS_OF_RANK_0 not in names and all(name.startswith("random_states_") for name in names):
        raise MissingCheckpoint(
            "checkpoint-missing",
            f"{folder} holds random streams alone.",
            why="when it was saved, this rank named another folder than rank 0, where the model is",
            fix="name rank 0's folder on every rank",
        )


def _number(path: str) -> int:
    return int(path.rpartition("_")[2])


def _make(folder: Path) -> None:
    with writing(f"making {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
