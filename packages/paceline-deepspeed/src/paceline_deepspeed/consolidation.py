"""`deepspeed.utils.zero_to_fp32`: whole weights of a checkpoint, ours or DeepSpeed's, in float32.

The command is `paceline checkpoint export FOLDER OUT`, or `python zero_to_fp32.py FOLDER OUT` by the script that lies beside
each checkpoint, as DeepSpeed's does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.log import warn_once
from paceline.checkpoint.format.checkpoint_format import format_of, newest_in
from paceline.checkpoint.format.manifest import STATE, Manifest, read_json
from paceline.checkpoint.store import Store, store_for
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.checkpoint.weights.model import load_model
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import read_whole
from paceline_deepspeed.checkpoint_format import DeepSpeedFormat
from paceline_deepspeed.module_state import KEY

# `zero_to_fp32.py`, beside each checkpoint of a ZeRO stage.
SCRIPT = '''"""Writes the whole weights of this checkpoint: python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER"""

from paceline_deepspeed.consolidation import main

if __name__ == "__main__":
    main()
'''


def main(words: Sequence[str] | None = None) -> None:
    """Runs `zero_to_fp32.py`, with DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="Writes the whole weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="what save_checkpoint was given, such as .")
    parser.add_argument("output_dir", help="the folder of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes after which a new file begins [5GB]")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint [what `latest` says]")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    arguments = vars(parser.parse_args(words))
    del arguments["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**arguments)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Reads the whole weights into memory, whatever `lazy_mode` says.

    Here and below `checkpoint_dir` is what `save_checkpoint` was given, and a tag of None takes what `latest` says.
    """
    place = _place(checkpoint_dir, tag)
    store = store_for(place)
    home = newest_in(store, store.resolve(place))
    frozen: Collection[str] = ()
    if exclude_frozen_parameters:
        frozen = _frozen_names(store, home)
    weights = open_weights(home)
    state: dict[str, Tensor] = {}
    for name in weights.entries:
        if name in frozen:
            continue
        value = read_whole(weights, name)
        dtype = value.dtype
        if value.is_floating_point():
            dtype = torch.float32
        # A copy, since a value that is float32 already may be a view of a vector of many parameters in the mapped file.
        # `torch.save` would write the whole vector, and the value would change with the file.
        state[name] = value.to(dtype, copy=True)
    # The files have a tied parameter once. `model.load_state_dict` needs it under all of its names.
    checkpoint_format = format_of(store, home)
    if checkpoint_format is not None:
        for other_name, name in checkpoint_format.tied_names(store, home).items():
            # Frozen parameters may have been left out, here or when the checkpoint was saved.
            if name in state:
                state[other_name] = state[name]
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the whole weights into a folder, tensor by tensor: `pytorch_model.bin`, or several files and an index.

    A new file begins after `max_shard_size` bytes; None writes one. Tied parameters have all of their names in files of
    torch, and one of them in safetensors.
    """
    limit = max_shard_size
    if limit is None:
        limit = 1 << 60  # bytes that no file reaches
    place = _place(checkpoint_dir, tag)
    frozen: Collection[str] = ()
    if exclude_frozen_parameters:
        store = store_for(place)
        frozen = _frozen_names(store, newest_in(store, store.resolve(place)))
    export_checkpoint(
        place,
        output_dir,
        max_shard_size=limit,
        safe_serialization=safe_serialization,
        tied_names=not safe_serialization,
        leave_out=frozen,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: Any = torch.float32,
    **keywords: Any,
) -> None:
    """Writes the files of `convert_zero_checkpoint_to_fp32_state_dict`; weights stay in the precision of the checkpoint."""
    if dtype not in (torch.float32, "float32", "fp32", None):
        warn_once(
            "compat", f"weights are written as they were kept, and not as {dtype}: use `engine.save_16bit_model`."
        )
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, **keywords)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Reads the whole weights into a model on this process, and returns it."""
    load_model(model, _place(checkpoint_dir, tag), strict=False)
    return model


def _frozen_names(store: Store, home: str) -> Collection[str]:
    """Returns the names of a checkpoint's parameters that were not trained; warns if it does not know them."""
    checkpoint_format = format_of(store, home)
    if isinstance(checkpoint_format, DeepSpeedFormat):
        return checkpoint_format.frozen_names(home)
    if checkpoint_format is not None and checkpoint_format.has_manifest:
        place = Manifest.read(store, home).place(store, home)
        engine_state = read_json(store, store.join(place, STATE))["run"]["extra"].get(KEY, {})
        if "frozen_parameters" in engine_state:
            return frozenset(engine_state["frozen_parameters"])
    warn_once(
        "compat",
        f"exclude_frozen_parameters has no effect: {home} does not say which parameters were frozen. Checkpoints of "
        "`engine.save_checkpoint` do.",
    )
    return ()


def _place(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> str:
    folder = os.fspath(checkpoint_dir)
    if tag is None:
        return folder  # what opens it follows its file `latest`
    return os.path.join(folder, str(tag))
