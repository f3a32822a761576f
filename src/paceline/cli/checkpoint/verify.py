"""Reads checkpoints whole and says which files are damaged; exit code 1 for any."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paceline.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline.checkpoint.listing import Entry


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes the path."""
    parser.usage = "paceline checkpoint verify PATH"
    parser.add_argument("path", metavar="PATH", help="one checkpoint, or a folder of checkpoints")


def run(args: argparse.Namespace) -> int:
    """Compares every file with its checksum."""
    from paceline.checkpoint.listing import entry, home_of, in_words, is_checkpoint, the_folder
    from paceline.checkpoint.manifest import verify

    store, home = home_of(args.path)
    if is_checkpoint(store, home):
        found = [each for each in [entry(store, home, store.parent(home)[1])] if each]
    else:
        found = the_folder(args.path)[2]
    progress = _text.Progress(sum(each.bytes for each in found if each.manifest))
    damaged = 0
    for each in found:
        problems = each.problems
        if each.manifest is not None:
            problems = tuple(verify(each.path, store, manifest=each.manifest, seen=progress))
        damaged += bool(problems)
        progress.clear()
        print(f"{each.name}: {_verdict(each, damaged=bool(problems))}", flush=True)
        for problem in problems:
            print(f"  {in_words(problem)}")
    return 1 if damaged else 0


def _verdict(checkpoint: Entry, *, damaged: bool) -> str:
    if damaged:
        return "damaged"
    if checkpoint.unfinished or checkpoint.manifest is None:
        return "unfinished"
    if not checkpoint.manifest.checksum:
        return "sound, but for its manifest, which has no checksum of its own (an older Paceline wrote it)"
    return "sound"
