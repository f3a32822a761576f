"""Checks all files of checkpoints, and lists damaged ones (exit code 1)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paceline_lens.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline_lens.checkpoint.listing import CheckpointEntry


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint verify PATH"
    parser.add_argument("path", metavar="PATH", help="one checkpoint, or a folder of checkpoints")


def run(args: argparse.Namespace) -> int:
    from paceline.checkpoint.format.manifest import verify
    from paceline_lens.checkpoint.listing import in_words, listed

    store, _, checkpoints = listed(args.path)
    progress = _text.CopyProgress(sum(checkpoint.bytes for checkpoint in checkpoints if checkpoint.manifest))
    damaged = 0
    for checkpoint in checkpoints:
        problems = checkpoint.problems
        if checkpoint.manifest is not None:
            problems = tuple(verify(checkpoint.path, store, manifest=checkpoint.manifest, seen=progress))
        damaged += bool(problems)
        progress.clear()
        print(f"{checkpoint.name}: {_verdict(checkpoint, damaged=bool(problems))}", flush=True)
        for problem in problems:
            print(f"  {in_words(problem)}")
    return 1 if damaged else 0


def _verdict(checkpoint: CheckpointEntry, *, damaged: bool) -> str:
    if damaged:
        return "damaged"
    if checkpoint.state == "unchecked":
        return f"not checked: the {checkpoint.format} format has no checksums"
    if checkpoint.unfinished or checkpoint.manifest is None:
        return "unfinished"
    if not checkpoint.manifest.checksum:
        return "sound, but for its manifest, which has no checksum of its own (an older Paceline wrote it)"
    return "sound"
