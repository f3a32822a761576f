"""Reads checkpoints whole and says which files are damaged; exit code 1 for any."""

from __future__ import annotations

import argparse

from paceline.cli.checkpoint import _text


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
        print(f"{each.name}: {'damaged' if problems else 'unfinished' if each.unfinished else 'sound'}", flush=True)
        for problem in problems:
            print(f"  {in_words(problem)}")
    return 1 if damaged else 0
