"""Shows what one checkpoint holds: plan, files, and with --tensors each tensor."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Manifest


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes the checkpoint, `--tensors` and `--json`."""
    parser.usage = "paceline checkpoint show [--tensors] [--json] CHECKPOINT"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder of one checkpoint")
    parser.add_argument("--tensors", action="store_true", help="each tensor with its shape and dtype")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints what the manifest says, and with `--tensors` the index."""
    from paceline.checkpoint.listing import plan_in_short, the_checkpoint
    from paceline.checkpoint.manifest import Manifest

    store, home = the_checkpoint(args.checkpoint)
    manifest = Manifest.read(store, home)
    tensors: dict[str, tuple[list[int], str]] = {}
    if args.tensors:
        from paceline.checkpoint.shards import read_index, shapes

        found = shapes(read_index(store, manifest.place(store, home)))
        tensors = {
            name: (list(shape), str(dtype).removeprefix("torch.")) for name, (shape, dtype) in sorted(found.items())
        }
    if args.json:
        rows = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in tensors.items()}
        print(json.dumps({"path": home, **asdict(manifest), **({"tensors": rows} if args.tensors else {})}, indent=2))
        return 0
    print("\n".join([home, *_facts(manifest, plan_in_short(manifest)), *_plan(manifest.plan), *_files(manifest)]))
    if tensors:
        print(f"tensors: {len(tensors)}")
        print(_text.table(((name, dtype, str(shape)) for name, (shape, dtype) in tensors.items()), "  "))
    return 0


def _facts(manifest: Manifest, plan: str) -> list[str]:
    rows = [
        ("step", str(manifest.step)),
        ("saved", f"{_text.moment(manifest.created)} ({_text.age(manifest.created)})"),
        ("by", f"{manifest.world_size} ranks, Paceline {manifest.paceline}, torch {manifest.torch}"),
        ("plan", plan),
        *((name, f"{value:g}") for name, value in manifest.metrics.items()),
    ]
    return [_text.table(rows, "  ")]


def _plan(plan: dict[str, Any]) -> list[str]:
    """The values that somebody chose, with where they came from."""
    chosen = [each for each in plan.get("decisions", ()) if each["source"] != "default"]
    rows = [(each["field"], str(each["value"]), each["where"] or each["reason"] or each["source"]) for each in chosen]
    return ["chosen:", _text.table(rows, "  ")] if rows else []


def _files(manifest: Manifest) -> list[str]:
    total = sum(fact.bytes for fact in manifest.files.values())
    rows = [(name, _text.size(fact.bytes), fact.checksum) for name, fact in sorted(manifest.files.items())]
    return [f"files: {len(rows)}, {_text.size(total)}", _text.table(rows, "  ")]
