"""`deepspeed.utils.zero_to_fp32`: whole weights of a checkpoint, ours or DeepSpeed's, in float32.

The command is `paceline checkpoint export FOLDER OUT`, or `python zero_to_fp32.py FOLDER OUT` by the script that lies beside
each checkpoint, as DeepSpeed's does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.log import warn_once
from paceline.checkpoint.format.checkpoint_format import format_of, newest_in
from paceline.checkpoint.store import store_for
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.checkpoint.weights.model import load_model
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import read_whole

# `zero_to_fp32.py`, beside each checkpoint of a ZeRO stage.
SCRIPT = '''"""Writes the whole weights of this checkpoint: python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER"""

from paceline.compat.deepspeed.consolidation import main

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
        "--exclude_frozen_parameters", action="store_true", help="no effect: they are written all the same"
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
    """Reads the whole weights into memory, whatever `lazy_mode` says; frozen parameters are among them.

    Here and below `checkpoint_dir` is what `save_checkpoint` was given, and a tag of None takes what `latest` says.
    """
    if exclude_frozen_parameters:
        _warn_of_frozen()
    place = _place(checkpoint_dir, tag)
    weights = open_weights(place)
    state: dict[str, Tensor] = {}
    for name in weights.entries:
        value = read_whole(weights, name)
        dtype = value.dtype
        if value.is_floating_point():
            dtype = torch.float32
        # A copy, since a value that is float32 already may be a view of a vector of many parameters in the mapped file.
        # `torch.save` would write the whole vector, and the value would change with the file.
        state[name] = value.to(dtype, copy=True)
    # The files have a tied parameter once. `model.load_state_dict` needs it under all of its names.
    store = store_for(place)
    home = newest_in(store, store.resolve(place))
    checkpoint_format = format_of(store, home)
    if checkpoint_format is not None:
        for other_name, name in checkpoint_format.tied_names(store, home).items():
            # A checkpoint without frozen parameters may lack it.
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

    A new file begins after `max_shard_size` bytes; None writes one. Frozen parameters are written in any case. Tied
    parameters have all of their names in files of torch, and one of them in safetensors.
    """
    if exclude_frozen_parameters:
        _warn_of_frozen()
    limit = max_shard_size
    if limit is None:
        limit = 1 << 60  # bytes that no file reaches
    place = _place(checkpoint_dir, tag)
    export_checkpoint(
        place,
        output_dir,
        max_shard_size=limit,
        safe_serialization=safe_serialization,
        tied_names=not safe_serialization,
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


def _warn_of_frozen() -> None:
    warn_once(
        "compat",
        "exclude_frozen_parameters has no effect here: frozen parameters are written too. To leave them out, save with "
        "`engine.save_checkpoint(..., exclude_frozen_parameters=True)`.",
    )


def _place(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> str:
    folder = os.fspath(checkpoint_dir)
    if tag is None:
        return folder  # what opens it follows its file `latest`
    return os.path.join(folder, str(tag))
