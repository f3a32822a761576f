"""Writes the weights of a checkpoint as files that other libraries read.

It goes tensor by tensor, without building the model. The checkpoint may have been saved under any plan, lie at a URL, or be one
that accelerate's FSDP divided.
"""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint export [options] CHECKPOINT FOLDER"
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint of Paceline, accelerate, DeepSpeed or torch.distributed.checkpoint",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder for the files; it is created if it does not exist")
    parser.add_argument("--max-shard-size", default="10GB", metavar="SIZE", help="maximum size of a file [10GB]")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="which model, if the checkpoint has several (model, model_1)"
    )
    parser.add_argument(
        "--format", choices=("safetensors", "torch"), default="safetensors", help="format of the files [safetensors]"
    )


def run(args: argparse.Namespace) -> int:
    import os

    from paceline.checkpoint.weights.export import export_checkpoint

    names = export_checkpoint(
        args.checkpoint,
        args.folder,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.format == "safetensors",
        model=args.model,
    )
    for name in names:
        print(os.path.join(args.folder, name))
    return 0
