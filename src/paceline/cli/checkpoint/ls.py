"""Lists the checkpoints of a folder, and what unfinished saves left there.

FOLDER holds checkpoints, is the project_dir of a run, or is one checkpoint. No tensor is read: `verify` does that.
"""

from __future__ import annotations

import argparse
import json

from paceline.cli.checkpoint import _text


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes the folder, and `--json`."""
    parser.usage = "paceline checkpoint ls [--json] FOLDER"
    parser.add_argument("folder", metavar="FOLDER", help="a folder of checkpoints, or a run's")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each checkpoint, the oldest first."""
    from paceline.checkpoint.listing import Entry, entry, home_of, is_checkpoint, the_folder

    store, home = home_of(args.folder)
    found: list[Entry]
    if is_checkpoint(store, home):
        found = [each for each in [entry(store, home, store.parent(home)[1])] if each]
    else:
        home, found = the_folder(args.folder)[1:]
    if args.json:
        print(json.dumps({"folder": home, "checkpoints": [each.json() for each in found]}, indent=2))
        return 0
    rows = [("name", "step", "age", "size", "ranks", "plan", "state")]
    for each in found:
        made, facts = each.manifest, each.json()
        rows.append(
            (
                each.name,
                str(made.step) if made else "-",
                _text.age(made.created) if made else "-",
                _text.size(each.bytes),
                str(made.world_size) if made else "-",
                str(facts["plan"] or "-"),
                f"damaged: {facts['problems'][0]}" if facts["problems"] else each.state,
            )
        )
    print(f"{home}\n{_text.table(rows, '  ')}")
    return 0
