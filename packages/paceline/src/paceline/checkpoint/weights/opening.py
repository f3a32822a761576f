"""`open_weights`: the weights in a file or a folder, whatever wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import is_safetensors, reading
from paceline.checkpoint.format.checkpoint_format import formats, newest_in
from paceline.checkpoint.format.shards import INDEX, read_index
from paceline.checkpoint.store import Store, confined, store_for
from paceline.checkpoint.weights.sources import KINDS, DividedWeights, SafeWeights, Weights, torch_weights


def open_weights(path: str | os.PathLike[str], model: str = "") -> Weights:
    """Returns the weights in a file or folder, whatever their format.

    Args:
        path: one file of weights, or a folder: of safetensors or torch's files, of torch's distributed format, a
            checkpoint of ours or of any other format that is registered, or one that names its newest checkpoint.
        model: in a checkpoint of several models, the name of the one that is wanted: "model", "model_1", ...

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    store = store_for(path)
    place = newest_in(store, store.resolve(os.fspath(path)))
    for checkpoint_format in formats():
        weights = checkpoint_format.weights(store, place, model)
        if weights is not None:
            return weights
    if store.exists(store.join(place, INDEX)):
        return distributed_weights(store, place)
    return weights_in_files(parts_of(store, place))


def distributed_weights(store: Store, folder: str) -> DividedWeights:
    """Returns the tensors in a folder of torch's distributed format; of a state that was saved as `{"model": state}`, these."""
    index = read_index(store, folder)
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    first_keys = set()
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            first_keys.add(tuple(paths.get(name, ()))[:1])
    # The names alone do not tell: a script may save a flat state whose names begin with "model.".
    nested = first_keys == {("model",)}
    return DividedWeights(store, folder, "model." if nested else "", index)


def weights_in_files(paths: Sequence[str]) -> Weights:
    """Returns the tensors of files that make one model together."""
    # By their first bytes and not by their names: scripts save weights under any name.
    if all(map(_holds_safetensors, paths)):
        return SafeWeights(paths)
    return torch_weights(paths)


def _holds_safetensors(path: str) -> bool:
    with reading(path), open(path, "rb") as file:
        return is_safetensors(file)


def parts_of(store: Store, folder: str) -> list[str]:
    """Files of a folder that hold the weights of a model, or the one file that was named.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    if os.path.isfile(folder):
        return [folder]
    for stem, ending in KINDS:
        single = f"{stem}.{ending}"
        index = os.path.join(folder, f"{stem}.{ending}.index.json")
        if os.path.exists(os.path.join(folder, single)):
            return [os.path.join(folder, single)]
        if os.path.exists(index):
            with reading(index), open(index, "rb") as file:
                names = list(json.loads(file.read())["weight_map"].values())
            # A value that is no name, in a file that was edited, is refused as a name is that leads elsewhere.
            unique_names: dict[str, None] = {}
            for name in names:
                unique_names[name if isinstance(name, str) else repr(name)] = None
            return [confined(store, folder, name, index) for name in unique_names]
    names_there = "no such folder"
    if os.path.isdir(folder):
        names_there = ", ".join(sorted(os.listdir(folder))[:8]) or "no file"
    raise CheckpointError(
        "checkpoint-missing",
        f"there are no weights in {folder}.",
        why=f"looked for model.safetensors and pytorch_model.bin, whole or cut; found: {names_there}",
        fix="name the folder that save_model wrote to",
    )
