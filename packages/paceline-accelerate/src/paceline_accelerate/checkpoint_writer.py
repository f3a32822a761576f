"""Writes the files of accelerate's `save_state` into the folder that a `Checkpointer` has claimed.

Older scripts read `pytorch_model.bin` and newer ones `model.safetensors`, so a script that does not say which it wants gets
both; `safe_serialization=True` or `False` writes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.agree import WriterPeers
from paceline.checkpoint.files import save_object, writing
from paceline.checkpoint.format.checkpoint_format import Claimed, files_of
from paceline.checkpoint.store import discard
from paceline.checkpoint.store.local import STORE
from paceline_accelerate.checkpoint_functions import agreed_by_writers, file_name, random_streams, write_states
from paceline_accelerate.folder_names import RECORD
from paceline_accelerate.rank_logger import get_logger
from paceline_accelerate.surroundings import writes_files
from paceline_accelerate.wrapping import without_repeated

if TYPE_CHECKING:
    from paceline.checkpoint.state.train_state import TrainState
    from paceline_accelerate.accelerator_base import AcceleratorBase
    from paceline_deepspeed.engine import DeepSpeedEngine

LOADERS = "paceline_loaders"  # our own key in the files of random streams; accelerate ignores it


def write_folder(
    accelerator: AcceleratorBase,
    engines: Sequence[DeepSpeedEngine],
    safe: bool | None,
    peers: WriterPeers,
    claimed: Claimed,
) -> Callable[[WriterPeers], int]:
    """Runs the hooks, lets engines save, collects random streams, and returns what writes the rest; a `FolderWriter`.

    Args:
        accelerator: whose state is saved.
        engines: DeepSpeed's engines of it, which save themselves.
        safe: safetensors (True), torch's format (False), or both (None).
        peers, claimed: as of every `FolderWriter`.
    """
    get_logger("accelerate.accelerator").info("Saving current state to %s", claimed.home)
    staged = claimed.staged
    writes = peers.rank == 0
    # With `save_on_each_node` the first rank of each host writes too, unless it sees the folder of rank 0.
    if writes_files(accelerator.project_configuration.save_on_each_node) and not STORE.exists(staged):
        writes = True
        with writing(f"making {claimed.home}"):
            staged = STORE.stage(claimed.home)
    weights = weights_after_hooks(accelerator, engines, staged)
    for number, engine in enumerate(engines):
        engine.save_checkpoint(staged, tag(number))
    streams = dict(peers.gather_object((accelerator.process_index, streams_of(accelerator))))

    def write() -> int:
        try:
            folder = Path(staged)
            _write_states(folder, weights, claimed.state, safe)
            for number, custom_object in enumerate(claimed.state.plain["custom"].values()):
                save_object(custom_object.state_dict(), folder / f"custom_checkpoint_{number}.pkl")
            names = [f"random_states_{rank}.pkl" for rank in streams]
            record = {"runs": claimed.manifest.runs, "writer": claimed.manifest.writer, "step": claimed.manifest.step}
            record["files"] = [*STORE.files(staged), *names]
            for name, stream in zip(names, streams.values(), strict=True):
                save_object({**stream, RECORD: record}, folder / name)
            num_bytes = sum(STORE.files(staged).values())
            with writing(f"saving the state to {claimed.home}"):
                # The script's own files are there too, even those that are open.
                STORE.merge(staged, claimed.home, owned=partial(files_of, STORE))
        except BaseException:
            discard(STORE, staged)
            raise
        return num_bytes

    return lambda writing_peers: agreed_by_writers(writing_peers, writes, write)


def _write_states(folder: Path, weights: Sequence[Any], state: TrainState, safe: bool | None) -> None:
    for number, values in enumerate(weights):
        if safe is not False:
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            save_object(without_repeated(tensors), folder / file_name("model", number, "safetensors"), True)
        if safe is not True:
            save_object(values, folder / file_name("pytorch_model", number, "bin"))
    optimizers = [state.optimizers[name] for name in state.optimizers if name.startswith("optimizer")]
    schedulers = list(state.plain["schedulers"].values())
    write_states(folder, optimizers, schedulers, list(state.plain["loaders"].values()), state.scaler)


def weights_after_hooks(accelerator: AcceleratorBase, engines: Sequence[DeepSpeedEngine], folder: str) -> list[Any]:
    """Returns the states of the models that are to be written, after the script's hooks have run."""
    models = accelerator.preparation.models
    weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
    # A hook may save a model itself and remove its entry from `weights`, as accelerate allows: it has to run before the
    # files are written.
    for hook in accelerator.states.hooks("save"):
        hook([*engines, *models], weights, folder)
    return weights


def streams_of(accelerator: AcceleratorBase) -> dict[str, Any]:
    """Returns this rank's random streams and step, as accelerate saves them, and the positions of loaders."""
    positions = [loader.state_dict() for loader in accelerator.run.prepared.loaders]
    streams = random_streams(accelerator.step, accelerator.device.type)
    return {**streams, LOADERS: positions}


def tag(number: int) -> str:
    """Returns the name of an engine's folder within a checkpoint."""
    if number == 0:
        return "pytorch_model"
    return f"pytorch_model_{number}"
