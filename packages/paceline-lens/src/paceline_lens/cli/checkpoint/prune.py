"""Removes old checkpoints from a folder, except those that a rule keeps.

Those with automatic names (`checkpoint_3`) alone are removed, whichever run has saved them; a checkpoint that any rule names
stays, and so does the newest. A run may be saving into the folder at the same time.
"""

from __future__ import annotations

import argparse

from paceline.base.errors import ConfigError
from paceline_lens.cli.checkpoint import _text


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint prune --keep-last N [options] FOLDER"
    parser.add_argument("folder", metavar="FOLDER", help="a folder of checkpoints, or the folder of a run")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N checkpoints")
    parser.add_argument(
        "--keep-every", type=int, metavar="K", help="keep the checkpoints whose step is a multiple of K"
    )
    parser.add_argument("--best", metavar="METRIC", help="keep the checkpoint with the best value of this metric")
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether the smallest or the largest value is the best [min]",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")


def run(args: argparse.Namespace) -> int:
    """Prints each checkpoint that is removed, with its size; returns 1 if one could not be removed."""
    from paceline.checkpoint import retention
    from paceline.checkpoint.format.checkpoint_format import NATIVE
    from paceline.checkpoint.keep import Keep
    from paceline_lens.checkpoint.listing import the_folder

    if args.keep_last is None and args.keep_every is None and args.best is None:
        raise ConfigError(
            "command-line",
            "paceline checkpoint prune: nobody said what stays.",
            fix="say `--keep-last N`, `--keep-every K` or `--best METRIC`",
        )
    keep = Keep(args.keep_last, args.keep_every, args.best, args.mode)
    store, folder, checkpoints = the_folder(args.folder)
    sizes = {checkpoint.path: checkpoint.bytes for checkpoint in checkpoints}
    newest = None
    for checkpoint in checkpoints:  # the oldest first
        if checkpoint.state == "complete" and retention.number(store, checkpoint.path) is not None:
            newest = checkpoint.path
    # Folders of other libraries tell neither step nor metrics, by which a rule would keep them.
    ours = {checkpoint.path for checkpoint in checkpoints if checkpoint.format == NATIVE}
    going = retention.surplus(store, folder, keep, newest, own=ours)
    if args.dry_run:
        for path in going:
            print(f"would remove {path} ({_text.size(sizes.get(path, 0))})")
        return 0
    for path in going:
        retention.remove(store, path)
    failed = [path for path in going if store.exists(path)]  # the log has said why
    for path in going:
        if path not in failed:
            print(f"removed {path} ({_text.size(sizes.get(path, 0))})")
    return 1 if failed else 0
