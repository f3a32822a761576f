"""`open_weights`: the weights in a file or a folder, whatever wrote them."""

from __future__ import annotations

import json
import os
import re

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.base.errors import CheckpointError
from paceline.checkpoint.deepspeed import DeepSpeedFolder, is_deepspeed, newest
from paceline.checkpoint.files import is_safetensors, reading
from paceline.checkpoint.local import STORE
from paceline.checkpoint.manifest import NAME, Manifest, verify
from paceline.checkpoint.shards import INDEX, read_index
from paceline.checkpoint.store import Store, confined, store_for
from paceline.checkpoint.weights import KINDS, DividedWeights, SafeWeights, Weights, torch_weights


def open_weights(path: str | os.PathLike[str], model: str = "") -> Weights:
    """The weights in a file or folder, whatever their format.

    Args:
        path: a folder (of safetensors or torch's files, one of our checkpoints, one of accelerate's or DeepSpeed's, one of
            torch's distributed format, or one whose file `latest` names such a folder in it), or one file of weights.
        model: in a checkpoint of several models, the name of the one that is wanted: "model", "model_1", ...

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    store = store_for(path)
    place = newest(store.resolve(os.fspath(path)))
    if store.exists(store.join(place, NAME)):
        return _checkpointed(store, place, model)
    if is_deepspeed(place):
        return DeepSpeedFolder(place).weights
    if store.exists(store.join(place, INDEX)):
        return _divided(store, place)
    number = int(model.rpartition("_")[2]) if re.fullmatch(r"model_\d+", model) else 0
    inner = store.join(place, f"pytorch_model_fsdp_{number}")
    if store.exists(store.join(inner, INDEX)):
        return _divided(store, inner)
    end = f"_{number}" if number else ""
    named = [f"{stem}{end}.{ending}" for stem, ending in (*KINDS, ("pytorch_model_fsdp", "bin"))]
    found = [store.join(place, name) for name in named if os.path.exists(store.join(place, name))]
    paths = found[:1] or parts_of(place)
    return SafeWeights(paths) if all(map(_holds_safetensors, paths)) else torch_weights(paths)


def _checkpointed(store: Store, home: str, model: str) -> Weights:
    """One model of a checkpoint of ours, whose files are there in full length."""
    manifest = Manifest.read(store, home)
    problems = verify(home, store, names=(), manifest=manifest)
    if problems:
        raise CheckpointError.of(problems)
    place = manifest.place(store, home)
    index = read_index(store, place)
    models = sorted({name.split("/")[1] for name in index.state_dict_metadata if name.startswith("models/")})
    chosen = model or (models[0] if len(models) == 1 else "")
    if chosen not in models:
        raise CheckpointError(
            "checkpoint-missing",
            f"the checkpoint {home} holds {len(models)} models" + (f", none of them {model}." if model else "."),
            why=f"they are called {', '.join(models)}" if models else "the run that saved it had prepared none",
            fix=f"say which: {models[0]}, for instance" if models else "name a checkpoint that holds a model",
        )
    return DividedWeights(store, place, f"models/{chosen}/", index)


def _divided(store: Store, place: str) -> Weights:
    index = read_index(store, place)
    names = [name for name, kept in index.state_dict_metadata.items() if isinstance(kept, TensorStorageMetadata)]
    told = index.planner_data if isinstance(index.planner_data, dict) else {}
    # accelerate saves {"model": state}, where another script may save a state whose names begin like this.
    nested = bool(names) and all(tuple(told.get(name, ()))[:1] == ("model",) for name in names)
    return DividedWeights(store, place, "model." if nested else "", index)


def _holds_safetensors(path: str) -> bool:
    with reading(path), open(path, "rb") as file:
        return is_safetensors(file)


def parts_of(folder: str) -> list[str]:
    """Files of a folder that hold the weights of a model, or the one file that was named.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    if os.path.isfile(folder):
        return [folder]
    for stem, ending in KINDS:
        single, index = f"{stem}.{ending}", os.path.join(folder, f"{stem}.{ending}.index.json")
        if os.path.exists(os.path.join(folder, single)):
            return [os.path.join(folder, single)]
        if os.path.exists(index):
            with reading(index), open(index, "rb") as file:
                names = list(json.loads(file.read())["weight_map"].values())
            unique_names = dict.fromkeys(name if isinstance(name, str) else repr(name) for name in names)
            return [confined(STORE, folder, name, index) for name in unique_names]
    there = ", ".join(sorted(os.listdir(folder))[:8]) if os.path.isdir(folder) else "no such folder"
    raise CheckpointError(
        "checkpoint-missing",
        f"there are no weights in {folder}.",
        why=f"looked for model.safetensors and pytorch_model.bin, whole or cut; found: {there}",
        fix="name the folder that save_model wrote to",
    )
