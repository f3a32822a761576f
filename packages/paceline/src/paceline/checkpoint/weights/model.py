"""`save_model` and `load_model`: the weights of a model, in files with the names that Hugging Face's libraries read.

    model.safetensors                                                one file
    model-00001-of-00003.safetensors, model.safetensors.index.json   several files of a limited size, with whole tensors
    pytorch_model.bin, pytorch_model-00001-of-00003.bin, ...         without `safe_serialization`

Tied weights are stored once; `load_model` assigns them to all of their names.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import CheckpointError
from paceline.base.files import expanded
from paceline.checkpoint.agree import Alone, WriterPeers, agreed, together
from paceline.checkpoint.state.match import Mismatch, Shape
from paceline.checkpoint.state.module_state import ModuleState, unwrap
from paceline.checkpoint.weights.divided import DividedModel
from paceline.checkpoint.weights.export import export_weights
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import Weights, fill
from paceline.world.parts import part_of_whole
from paceline.world.sharded import local

_log = logging.getLogger("paceline.checkpoint")


def save_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    peers: WriterPeers | None = None,
    order: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes the weights of a model. It needs at most 64 MB of memory on a rank, besides the weights that the rank has.

    Args:
        model: the model, with or without wrappers; its parameters may be divided. The names are those of the user's module.
        directory: it is created if necessary. Files of an earlier save of the model are replaced; all others are kept.
        max_shard_size: the largest size of a file, in bytes or as text such as "10GB".
        safe_serialization: whether to write safetensors; otherwise torch's format.
        state_dict: weights to write instead of those of the model.
        peers: the ranks that together hold the model; None writes what this rank holds.
        order: the names of the whole model in their order, if this rank holds only some of them.
        tied: other names of tied parameters -> the first name.

    Returns:
        The names of the files, in order.

    Ranks:
        All ranks of `peers`.

    Raises:
        CheckpointError: `checkpoint-size`, `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`. An
            earlier save is then still complete.
    """
    if state_dict is None:
        source = DividedModel.of(model, peers, order, tied)
    else:
        source = DividedModel(_unique(state_dict), peers, order)
    return export_weights(source, directory, max_shard_size, safe_serialization, peers)


def load_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    peers: WriterPeers | None = None,
    tied: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Reads weights into a model; each rank reads its part. If they do not fit, nothing changes.

    On both sides, names may have the prefixes of wrappers (`module.`, `_orig_mod.`, `_fsdp_wrapped_module.`).

    Args:
        model: the model, with or without wrappers; it may be divided, and on the meta device.
        directory: a folder that `save_model` or a Hugging Face library wrote, a checkpoint of Paceline, a folder of torch's
            distributed checkpoint, or one file (safetensors, or what `torch.save` wrote).
        strict: whether the names must be the same. The shapes must always be the same.
        peers: the ranks that together hold the model; None for this rank only.
        tied: other names of tied parameters -> the first name.

    Returns:
        The names that were not loaded; always empty with `strict`.

    Ranks:
        All ranks of `peers`.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`, `checkpoint-other-model`.
    """
    peers = peers or Alone()
    text = os.fspath(directory)
    folder = text if "://" in text else os.path.abspath(expanded(text))
    tied = tied or {}
    weights = agreed(peers, f"opening {folder}", lambda: open_weights(folder))
    state = ModuleState.of(model)
    names = {*tied, *tied.values()}
    for names_of_rank in together(peers, f"comparing {folder}", lambda: set(state.raw)):
        names |= names_of_rank
    sources, own_mismatch = match(state, weights, names, tied)
    mismatch = Mismatch.of_all(together(peers, f"comparing {folder}", lambda: own_mismatch))
    if mismatch and (strict or mismatch.misshapen):
        raise CheckpointError.of([mismatch.problem("this one", folder)])

    def read() -> None:
        # Memory is only allocated now, when all ranks know that the weights fit.
        if any(tensor.is_meta for tensor in state.tensors.values()):
            _materialise(model, state, sources)
        for name, source in sources.items():
            tensor = state.tensors[name]
            fill(local(tensor), part_of_whole(tensor), weights, source)
        state.put(model, {})

    agreed(peers, f"reading {folder}", read)
    left_out = (*mismatch.missing, *mismatch.unexpected)
    if left_out and peers.rank == 0:
        listed = ", ".join(left_out[:8])
        _log.warning("loaded %s: %d names do not agree and were left out: %s", folder, len(left_out), listed)
    return left_out


def saved_names_of(weights: Weights, names: Collection[str]) -> dict[str, str]:
    """Returns the saved name of each tensor, by its name in the model; by the saved name if the model does not have it."""
    saved_names: dict[str, str] = {}
    for key in weights.entries:
        own = key
        for name in without_wrappers(key):
            if name in names:
                own = name
                break
        saved_names.setdefault(own, key)
    return saved_names


def match(
    state: ModuleState, weights: Weights, names: set[str], tied: Mapping[str, str]
) -> tuple[dict[str, str], Mismatch]:
    """Finds the saved tensor for each tensor of a module, and the differences between the two.

    Args:
        state: the tensors that this rank holds.
        weights: the saved tensors.
        names: the names of the whole model, on all ranks.
        tied: other names of tied parameters -> the first name.

    Returns:
        The saved name of each tensor of this rank, and the differences.
    """
    saved_names = saved_names_of(weights, names)
    missing: dict[str, Shape] = {}
    misshapen: dict[str, tuple[Shape, Shape]] = {}
    sources: dict[str, str] = {}
    for name, tensor in state.tensors.items():
        same_tensor = names_of_same_tensor(name, state.aliases, tied)
        saved_under = [saved_names[other] for other in same_tensor if other in saved_names]
        source = saved_under[0] if saved_under else None
        if source is None:
            missing[name] = tuple(tensor.shape)
        elif weights.entries[source].shape != tuple(tensor.shape):
            misshapen[name] = (weights.entries[source].shape, tuple(tensor.shape))
        else:
            sources[name] = source
    unexpected: dict[str, Shape] = {}
    for name in sorted(saved_names.keys() - names):
        unexpected[name] = weights.entries[saved_names[name]].shape
    return sources, Mismatch(missing, unexpected, misshapen)


def names_of_same_tensor(name: str, aliases: Mapping[str, str], tied: Mapping[str, str]) -> list[str]:
    """Returns all names of a tensor: the given one first, then those to which it is tied."""
    first = tied.get(name, name)
    pairs = (*aliases.items(), *tied.items())
    others = [alias for alias, own in pairs if own in (name, first)]
    return list(dict.fromkeys([name, first, *others]))


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)\.")


def without_wrappers(key: str) -> Iterator[str]:
    """Yields a saved name as it is, then without the prefixes of wrappers: compilation, FSDP, recomputation, DDP."""
    yield key
    plain = _WRAPPERS.sub("", key)
    yield plain
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
        yield plain


def _unique(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors without the other names of tensors that share the same memory."""
    first_names: dict[object, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                "checkpoint-value",
                f"{name} is a {type(tensor).__qualname__}, which a file of weights does not hold.",
                why="`state_dict` holds more than tensors",
                fix="remove it from `state_dict`, or save it with `save`",
            )
        # Empty tensors have no memory, so each of them counts as a tensor of its own.
        memory: object = name
        if tensor.numel():
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        first_names.setdefault(memory, name)
    return {name: tensors[name] for name in first_names.values()}


def _materialise(model: nn.Module, state: ModuleState, wanted: Iterable[str]) -> None:
    """Allocates memory on the CPU for those tensors on the meta device that will be read."""
    for name in wanted:
        tensor = state.tensors[name]
        if not tensor.is_meta:
            continue
        real = torch.empty_like(tensor, device="cpu")
        state.tensors[name] = real
        parameter: nn.Parameter | None = None
        # All names of a tied parameter must lead to one new parameter, or the modules would train copies of it.
        aliases = [alias for alias, first in state.aliases.items() if first == name]
        for own_name in (name, *aliases):
            path, _, key = state.raw[own_name].rpartition(".")
            owner = unwrap(model).get_submodule(path)
            old = getattr(owner, key)
            if not isinstance(old, nn.Parameter):
                setattr(owner, key, real)
                continue
            if parameter is None:
                parameter = nn.Parameter(real, old.requires_grad)
            setattr(owner, key, parameter)
