"""accelerate's functions that save and load a model sharded by FSDP, and its optimizer, in accelerate's own files.

    FULL_STATE_DICT       pytorch_model_fsdp.bin, optimizer.bin          whole tensors; rank 0 writes
    SHARDED_STATE_DICT    pytorch_model_fsdp_0/, optimizer_0/            torch's distributed format; each rank writes its part

The plugin's `state_dict_type` decides what is written. Loading takes whichever of the two is there, at any number of
processes and under any plan.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import CheckpointError, CompatError
from paceline.checkpoint.agree import WriterPeers, agreed
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.files import load_object, save_object, writing
from paceline.checkpoint.format.checkpoint_format import Claimed, RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.train_state import TrainState
from paceline.checkpoint.store import Store, store_for
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.checkpoint.weights.sources import DividedWeights, read_whole
from paceline.world.sharded import division_of, is_sharded, whole
from paceline_accelerate.checkpoint_format_state import AccelerateReader
from paceline_accelerate.checkpoint_functions import agreed_by_writers, file_name
from paceline_accelerate.state import PartialState
from paceline_accelerate.surroundings import is_peft_model, writes_files

if TYPE_CHECKING:
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

_LAST = ".metadata"  # the file that torch writes last: a folder without it was not finished
_ONE_FILE = 1 << 60  # limit of a file's bytes that is never reached: accelerate merges into a single file


@dataclass(frozen=True)
class _Places:
    """Where the state of one model or optimizer lies in a folder.

    Attributes:
        whole: the file with whole tensors.
        divided: the folder with the parts of all ranks.
    """

    whole: Path
    divided: Path

    @property
    def present(self) -> Path | None:
        """The one of the two that exists; None where neither does."""
        if (self.divided / _LAST).is_file():
            return self.divided
        if self.whole.is_file():
            return self.whole
        return None


def _places(folder: str | Path, stem: str, number: int) -> _Places:
    """Returns where a state is written: always below the folder, which may hold other files of the user."""
    root = Path(folder)
    return _Places(root / file_name(stem, number, "bin"), root / f"{stem}_{number}")


def _places_to_read(folder: str | Path, stem: str, number: int) -> _Places:
    """Returns where a state is read. A caller may also name the folder with the parts itself."""
    places = _places(folder, stem, number)
    root = Path(folder)
    if stem in root.name and not places.divided.is_dir():
        return _Places(places.whole, root)
    return places


def _is_divided(fsdp_plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> bool:
    """Whether each rank writes its own part.

    Raises:
        CompatError: `compat-argument`, for LOCAL_STATE_DICT, and for a sharded state without torch's distributed format.
    """
    kind = str(getattr(fsdp_plugin, "state_dict_type", None) or "")
    if "LOCAL" in kind:
        raise CompatError(
            "compat-argument",
            "LOCAL_STATE_DICT is not carried.",
            why="its files hold flattened parts that only the same number of processes can read",
            fix="use state_dict_type='SHARDED_STATE_DICT', which each rank writes alone as well",
        )
    _check_format(kind, use_dcp)
    return "SHARDED" in kind


def _check_format(kind: str, use_dcp: bool) -> None:
    """Refuses a sharded state without torch's distributed format.

    Raises:
        CompatError: `compat-argument`.
    """
    if "SHARDED" in kind and not use_dcp:
        raise CompatError(
            "compat-argument",
            "use_dcp=False is not carried.",
            why="each rank would save a file that only the same rank of as many processes can load",
            fix="leave it out: each rank writes its part in torch's distributed format; or state_dict_type='FULL_STATE_DICT'",
        )


def _write(accelerator: Accelerator, kind: str, state: Mapping[str, Any], places: _Places, is_divided: bool) -> None:
    """Writes the state of a model or an optimizer as a file, or as a folder with every rank's part. Ranks: all."""
    peers = accelerator.collectives
    if is_divided:
        Checkpointer(peers).save(places.divided, TrainState(), writer=partial(_write_parts, {kind: dict(state)}))
        return
    writes = writes_files(accelerator.project_configuration.save_on_each_node)
    agreed_by_writers(peers, writes, lambda: save_object(state, places.whole))


def _parts(store: Store, folder: str) -> list[str] | None:
    """Returns the files of a distributed checkpoint, none of which are a user's; None where it was not finished."""
    files = list(store.files(folder))
    return files if _LAST in files else None


def _write_parts(state: dict[str, Any], _: WriterPeers, claimed: Claimed) -> Callable[[WriterPeers], int]:
    """Writes a state in torch's distributed format, of which each rank writes its part; a `FolderWriter`.

    Such a folder that is written over an older one can load as a mix of both. So it is a new one, which replaces the old.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    store = claimed.store
    staged = claimed.staged

    def publish() -> int:
        num_bytes = sum(store.files(staged).values())
        store.publish(staged, claimed.home, last=_LAST, owned=partial(_parts, store))
        return num_bytes

    def write(peers: WriterPeers) -> int:
        with writing(f"saving {claimed.home}"):
            save(state, checkpoint_id=staged, no_dist=peers.size == 1)
        return agreed(peers, f"saving {claimed.home}", publish if peers.rank == 0 else int)

    return write


def _written(
    fsdp_plugin: FullyShardedDataParallelPlugin, use_dcp: bool, places: _Places, what: str, names: Sequence[str]
) -> Path:
    """Returns the file or folder from which a state can be loaded.

    Args:
        names: of files that transformers' Trainer writes where no plan divides the model, as on one process.

    Raises:
        CompatError: `compat-argument`.
        CheckpointError: `checkpoint-missing`.
    """
    _check_format(str(getattr(fsdp_plugin, "state_dict_type", None)), use_dcp)
    path = places.present
    for name in names:
        undivided = places.whole.parent / name
        if path is None and undivided.is_file():
            path = undivided
    if path is None:
        raise CheckpointError(
            "checkpoint-missing",
            f"{places.whole.parent} holds no state of {what}.",
            why=f"there is none of {places.whole.name}, {places.divided.name}/.metadata, {', '.join(names)}",
            fix="name the folder that `save_fsdp_model` and `save_fsdp_optimizer` were given",
        )
    return path


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes a model's state in one file, or each rank's part of it, as the plugin's `state_dict_type` says.

    Args:
        adapter_only: whether only the adapter of a peft model is written.
        use_dcp: False is refused where each rank writes its part.

    Ranks: all call it.

    Raises:
        CompatError: `compat-argument`, for LOCAL_STATE_DICT and `use_dcp=False`.
        CheckpointError: on every rank.
    """
    places = _places(output_dir, "pytorch_model_fsdp", model_index)
    is_divided = _is_divided(fsdp_plugin, use_dcp)
    module = accelerator.unwrap_model(model)
    # In a sharded model the parameters are DTensors: torch's distributed checkpoint writes only this rank's part of them, and
    # writes replicated tensors once.
    if is_divided:
        state = module.state_dict()
    else:
        state = accelerator.get_state_dict(model)  # gathers, so all ranks call it although rank 0 alone writes
    if adapter_only and is_peft_model(module):
        state = _adapter_of(fsdp_plugin, module, state)
    _write(accelerator, "model", state, places, is_divided)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads what `save_fsdp_model`, accelerate's or this one, wrote; each rank reads its part.

    Args:
        adapter_only: whether only the adapter of a peft model is loaded.
        use_dcp: False is refused, as in `save_fsdp_model`.

    Returns:
        What `load_state_dict` returns when all names match, because transformers' Trainer looks at it.

    Ranks: all call it.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-other-model`, and those of reading.
    """
    places = _places_to_read(input_dir, "pytorch_model_fsdp", model_index)
    path = _written(fsdp_plugin, use_dcp, places, "a model", ("model.safetensors", "pytorch_model.bin"))
    module = accelerator.unwrap_model(model)
    if not (adapter_only and is_peft_model(module)):
        accelerator.load_model(model, path)
        return nn.Module().load_state_dict({})
    from peft import set_peft_model_state_dict

    adapter = _adapter_in(path)
    # The adapter's tensors are whole, so the parameters are gathered for the copy and divided again afterwards.
    gathered: AbstractContextManager[Any] = nullcontext()
    if accelerator.run.prepared.find(model) is not None:
        gathered = accelerator.full_parameters(model, writeback=True)
    with gathered:
        if adapter.keys() <= module.state_dict().keys():
            module.load_state_dict(adapter, strict=False)
        else:
            # peft saves an adapter under names that the model does not have, so only peft can map them back.
            set_peft_model_state_dict(module, adapter)
    return nn.Module().load_state_dict({})


def _adapter_of(
    fsdp_plugin: FullyShardedDataParallelPlugin, module: nn.Module, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the adapter's part of a model's state: with FSDP 2 under the model's own names, else under peft's."""
    if getattr(fsdp_plugin, "fsdp_version", 2) == 2:
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in state.items() if name in trained}
    from peft import get_peft_model_state_dict

    adapter: dict[str, Any] = get_peft_model_state_dict(module, state_dict=state)
    return adapter


def _adapter_in(path: Path) -> dict[str, torch.Tensor]:
    """Reads the whole tensors of a saved adapter."""
    if path.is_file():
        return dict(load_object(path))
    weights = DividedWeights(store_for(str(path)), str(path), "model.")
    return {name: read_whole(weights, name) for name in weights.entries}


def _by_name(accelerator: Accelerator, optimizer: Any, model: nn.Module) -> OptimizerState:
    """Returns the torch optimizer inside a prepared one, together with the names of its parameters."""
    module = accelerator.unwrap_model(model)
    names = {parameter: name for name, parameter in module.named_parameters()}
    return OptimizerState.of(getattr(optimizer, "optimizer", optimizer), names)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes an optimizer's state by parameter name, in one file or in parts, as the plugin's `state_dict_type` says.

    Ranks: all call it. For one file each rank holds the whole state in memory for a moment.

    Raises:
        CompatError: `compat-argument`, for LOCAL_STATE_DICT and `use_dcp=False`.
        CheckpointError: on every rank.
    """
    is_divided = _is_divided(fsdp_plugin, use_dcp)
    optimizer_state = _by_name(accelerator, optimizer, model)
    torch_optimizer = optimizer_state.optimizer
    names = list(optimizer_state.parameters)
    states: dict[str, dict[str, Any]] = {}
    states_of_this_rank: dict[str, dict[str, Any]] = {}
    # The states are taken from `state_dict()` and not from `.state`: under ZeRO the optimizer holds plain tensors of its rows,
    # and only `state_dict()` returns them as DTensors.
    for number, state in torch_optimizer.state_dict()["state"].items():
        name = names[number]
        has_parts = any(is_sharded(value) for value in state.values())
        entries = dict(state)
        if not is_divided:
            entries = {key: whole(value) for key, value in state.items()}
        if has_parts or division_of(torch_optimizer, optimizer_state.parameters[name]) is None:
            states[name] = entries
        else:
            # ZeRO may give a whole parameter to one rank, so the others have no state for it.
            states_of_this_rank[name] = entries
    for states_of_rank in accelerator.collectives.gather_object(states_of_this_rank):
        states.update(states_of_rank)
    # Files name the parameters, because their numbers are those of this very script's groups.
    names_of_groups: list[list[str]] = [[] for _ in torch_optimizer.param_groups]
    for name, group_number in optimizer_state.groups.items():
        names_of_groups[group_number].append(name)
    groups = []
    for group, names_of_group in zip(torch_optimizer.param_groups, names_of_groups, strict=True):
        groups.append({**group, "params": names_of_group})
    # Every rank needs the same order, because the ranks plan the distributed checkpoint together.
    ordered_states = {name: states[name] for name in names if name in states}
    places = _places(output_dir, "optimizer", optimizer_index)
    _write(accelerator, "optimizer", {"state": ordered_states, "param_groups": groups}, places, is_divided)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Loads what `save_fsdp_optimizer`, accelerate's or this one, wrote; each rank keeps its part.

    The number of processes and the plan may be others than when it was saved.

    Ranks: all call it.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-other-model`, and those of reading.
    """
    places = _places_to_read(input_dir, "optimizer", optimizer_index)
    path = _written(fsdp_plugin, use_dcp, places, "an optimizer", ("optimizer.pt",))
    models = {"model": accelerator.unwrap_model(model)}
    optimizers = {"optimizer": getattr(optimizer, "optimizer", optimizer)}
    state = TrainState(models=models, optimizers=optimizers).narrowed({"optimizers"})

    def read(store: Store, folder: str, state: TrainState, peers: WriterPeers) -> OpenCheckpoint:
        reader = AccelerateReader(store, folder, state, RunNames.of(state, peers, folder))
        return agreed(peers, f"reading {path}", lambda: reader.read_optimizer(path.name))

    Checkpointer(accelerator.collectives).load(path.parent, state, reader=read)


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merges the sharded weights that accelerate's FSDP saved into one file of whole weights, tensor by tensor.

    Args:
        checkpoint_dir: accelerate's `pytorch_model_fsdp_0` folder.
        output_path: folder that gets `model.safetensors` or `pytorch_model.bin`.
        safe_serialization: whether it is `model.safetensors`.
        remove_checkpoint_dir: whether `checkpoint_dir` is removed afterwards.

    Ranks: all call it and the main process merges; a script without processes may call it too.

    Raises:
        CheckpointError: `checkpoint-missing`, and those of reading and writing.
    """
    folder = Path(checkpoint_dir)
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            "checkpoint-missing",
            f"{folder} holds no divided weights.",
            why="there is no .metadata in it",
            fix=f"name the folder that accelerate wrote them to, such as {folder / 'pytorch_model_fsdp_0'}",
        )

    def merge() -> None:
        if state.is_main_process:
            export_checkpoint(folder, output_path, max_shard_size=_ONE_FILE, safe_serialization=safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(folder)

    state = PartialState()
    agreed(state.collectives, f"merging {folder}", merge)
