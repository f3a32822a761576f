"""Lists the checkpoints of a folder, and what unfinished saves have left there.

FOLDER holds checkpoints, is the project_dir of a run, or is one checkpoint. No tensor is read: `verify` does that.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from paceline_lens.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline_lens.checkpoint.listing import CheckpointEntry


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint ls [--json] FOLDER"
    parser.add_argument("folder", metavar="FOLDER", help="a folder of checkpoints, or the folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from paceline_lens.checkpoint.listing import listed

    _, folder, checkpoints = listed(args.folder)
    if args.json:
        as_json = [checkpoint.json() for checkpoint in checkpoints]
        print(json.dumps({"folder": folder, "checkpoints": as_json}, indent=2))
        return 0
    rows: list[tuple[str, ...]] = [("name", "step", "age", "size", "ranks", "plan", "state")]
    rows += [_row(checkpoint) for checkpoint in checkpoints]
    print(f"{folder}\n{_text.table(rows)}")
    return 0


def _row(checkpoint: CheckpointEntry) -> tuple[str, ...]:
    summary = checkpoint.summary
    facts = checkpoint.json()
    state = checkpoint.state
    if state == "unchecked":
        state = f"{checkpoint.format} format, unchecked"
    elif facts["problems"]:
        state = f"damaged: {facts['problems'][0]}"
    return (
        checkpoint.name,
        _text.or_dash(summary.step),
        "-" if summary.created is None else _text.age(summary.created),
        _text.size(checkpoint.bytes),
        _text.or_dash(summary.world_size),
        _text.or_dash(facts["plan"]),
        state,
    )
