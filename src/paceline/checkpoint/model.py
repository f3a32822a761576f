"""A model alone, under the names that Hugging Face's libraries read.

    model.safetensors                                            one file
    model-00001-of-00003.safetensors, model.safetensors.index.json   cut by size, whole tensors in each file
    pytorch_model.bin, pytorch_model-00001-of-00003.bin, ...         where `safe_serialization` is off

Tied weights are stored once; `load_model` gives them to all of their names.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import read_tensors, reading, replacing, write_safetensors, writing
from paceline.checkpoint.match import Mismatch
from paceline.checkpoint.module_state import ModuleState

_log = logging.getLogger("paceline.checkpoint")
SAFE, UNSAFE = ("model", "safetensors"), ("pytorch_model", "bin")
_UNITS = {"": 1, **{f"{unit}{end}": base**power for power, unit in enumerate("KMGTP", 1)
                    for end, base in (("", 1000), ("B", 1000), ("IB", 1024))}, "B": 1}  # fmt: skip


def parse_size(size: int | str) -> int:
    """Bytes that a size such as 5000, "10GB" or "512MiB" means.

    Raises:
        CheckpointError: `checkpoint-size`.
    """
    if isinstance(size, int) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if found and found[2].upper() in _UNITS and float(found[1]) > 0:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    raise CheckpointError(
        "checkpoint-size",
        f"{size!r} is not a size.",
        why="a size is a number above 0, with a unit or without",
        fix='write one such as "10GB", "512MiB" or 1000000',
    )


def save_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Writes a model's weights; call it on one rank.

    Args:
        model: wrapped or not; names are those of the user's module.
        directory: made where it is missing; files of an earlier save of the model there are replaced, others kept.
        max_shard_size: bytes after which a new file begins.
        safe_serialization: safetensors, or else torch's format.
        state_dict: weights to write in place of the model's own: those that were gathered from shards, say.

    Returns:
        Names of the files, in order.

    Ranks: one; no communication. Sharded tensors must have been gathered into `state_dict`.

    Raises:
        CheckpointError: `checkpoint-size`, `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`.
    """
    limit = parse_size(max_shard_size)
    tensors = _unique(state_dict) if state_dict is not None else _own(model)
    stem, ending = SAFE if safe_serialization else UNSAFE
    parts = _cut(tensors, limit)
    names = [
        f"{stem}.{ending}" if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}"
        for number in range(1, len(parts) + 1)
    ]
    folder = os.path.abspath(os.fspath(directory))
    with writing(f"saving the model to {folder}"):
        os.makedirs(folder, exist_ok=True)
        before = {name for name in os.listdir(folder) if _is_part(name)}
        for name, part in zip(names, parts, strict=True):
            with replacing(os.path.join(folder, name)) as file:
                if safe_serialization:
                    write_safetensors(part, file)
                else:
                    torch.save({key: tensor.detach().cpu() for key, tensor in part.items()}, file)
        index = f"{stem}.{ending}.index.json"
        if len(parts) > 1:
            size = sum(tensor.nbytes for tensor in tensors.values())
            places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
            with replacing(os.path.join(folder, index)) as file:
                file.write(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1).encode())
            names.append(index)
        for name in before - set(names):  # of an earlier save: a reader would not know which to take
            os.remove(os.path.join(folder, name))
    return names


def load_model(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> tuple[str, ...]:
    """Reads weights that `save_model` or a Hugging Face library wrote; changes nothing where they do not fit.

    Args:
        model: wrapped or not.
        directory: the folder, or one file of weights.
        strict: whether the names must be the same; shapes must always be.

    Returns:
        Names that were left out for want of `strict`; empty otherwise.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-other-model`.
    """
    folder = os.path.abspath(os.fspath(directory))
    found: dict[str, Tensor] = {}
    for path in _parts(folder):
        found |= read_tensors(path)
    state = ModuleState.of(model)
    mismatch, sources, known = Mismatch(), {}, set()
    for name, tensor in state.tensors.items():
        names = [name, *(alias for alias, first in state.aliases.items() if first == name)]
        source = next((key for key in names if key in found), None)
        if source is None:
            mismatch.missing[name] = tuple(tensor.shape)
        elif found[source].shape != tensor.shape:
            mismatch.misshapen[name] = (tuple(found[source].shape), tuple(tensor.shape))
        else:
            sources[name] = source
        known |= set(names)
    mismatch.unexpected = {name: tuple(found[name].shape) for name in sorted(found.keys() - known)}
    if mismatch and (strict or mismatch.misshapen):
        raise CheckpointError.of([mismatch.problem("this one", folder)])
    for name, source in sources.items():
        state.tensors[name].copy_(found[source])
    state.put(model, {})
    left = (*mismatch.missing, *mismatch.unexpected)
    if left:
        _log.warning("loaded %s: %d names do not agree and were left out: %s", folder, len(left), ", ".join(left[:8]))
    return left


def _own(model: nn.Module) -> dict[str, Tensor]:
    state = ModuleState.of(model)
    if state.values:
        name = next(iter(state.values))
        raise CheckpointError(
            "checkpoint-value",
            f"{name} is a {type(state.values[name]).__qualname__}, which a file of weights does not hold.",
            why="the module puts more than tensors into its state_dict",
            fix="save the whole state with save_state, or give `state_dict` without it",
        )
    return dict(state.tensors)


def _unique(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of tensors that share the same memory."""
    kept: dict[Any, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        kept.setdefault(place, name)
    return {name: tensors[name] for name in kept.values()}


def _cut(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    return parts


def _is_part(name: str) -> bool:
    return any(
        re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?", name) is not None
        for stem, ending in (SAFE, UNSAFE)
    )


def _parts(folder: str) -> list[str]:
    """Files of a folder that hold the weights."""
    if os.path.isfile(folder):
        return [folder]
    for stem, ending in (SAFE, UNSAFE):
        single, index = f"{stem}.{ending}", os.path.join(folder, f"{stem}.{ending}.index.json")
        if os.path.exists(os.path.join(folder, single)):
            return [os.path.join(folder, single)]
        if os.path.exists(index):
            with reading(index), open(index, "rb") as file:
                names = dict.fromkeys(json.loads(file.read())["weight_map"].values())
            return [os.path.join(folder, os.path.basename(cast(str, name))) for name in names]
    there = ", ".join(sorted(os.listdir(folder))[:8]) if os.path.isdir(folder) else "no such folder"
    raise CheckpointError(
        "checkpoint-missing",
        f"there are no weights in {folder}.",
        why=f"looked for model.safetensors and pytorch_model.bin, whole or cut; found: {there}",
        fix="name the folder that save_model wrote to",
    )
