"""`accelerate merge-weights`: writes whole weights from the divided ones that FSDP saved."""

from __future__ import annotations

import argparse
from typing import Any

from paceline_accelerate.commands.arguments import parser_for

description = "Makes whole weights from the divided ones that FSDP saved with SHARDED_STATE_DICT."


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate merge-weights`."""
    parser = parser_for("merge-weights", "", merge_command, subparsers, description=description)
    add = parser.add_argument
    unsafe = ("--unsafe_serialization", "--unsafe-serialization")
    remove = ("--remove_checkpoint_dir", "--remove-checkpoint-dir")
    add("checkpoint_directory", type=str, help="the folder of divided weights")
    add("output_path", type=str, help="the folder of the whole weights")
    add(*unsafe, action="store_true", default=False, help="write .bin in place of .safetensors")
    add(*remove, action="store_true", default=False, help="remove the divided weights afterwards")
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merges the weights.

    Raises:
        CheckpointError: as `merge_fsdp_weights`.
    """
    from paceline_accelerate.sharded import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )


def main() -> int:
    """Runs the command `accelerate-merge-weights`."""
    from paceline_accelerate.commands.accelerate_cli import reporting

    return reporting(lambda: merge_command(merge_command_parser().parse_args()))
