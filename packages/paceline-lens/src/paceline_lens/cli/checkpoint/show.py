"""Shows a checkpoint: its plan, its files, and with --tensors each tensor."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline_lens.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline.checkpoint.format.manifest import Manifest


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint show [--tensors] [--json] CHECKPOINT"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder of one checkpoint")
    parser.add_argument("--tensors", action="store_true", help="also list each tensor with its shape and dtype")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from paceline.checkpoint.format.manifest import Manifest
    from paceline_lens.checkpoint.listing import the_checkpoint

    store, home, checkpoint_format = the_checkpoint(args.checkpoint)
    if checkpoint_format.has_manifest:
        manifest = Manifest.read(store, home)
        as_json = asdict(manifest)
        lines = [*_facts(manifest), *_plan(manifest.plan), *_files(manifest)]
    else:
        summary = checkpoint_format.summary(store, home)
        sizes = store.files(home)
        as_json = {"format": checkpoint_format.name, **asdict(summary), "files": sizes}
        lines = [_text.table([("format", checkpoint_format.name), ("step", _text.or_dash(summary.step))])]
        rows_of_files = [(name, _text.size(size)) for name, size in sizes.items()]
        lines += [f"files: {len(sizes)}, {_text.size(sum(sizes.values()))}", _text.table(rows_of_files)]
    tensors = _tensors(home) if args.tensors else {}
    if args.json:
        if args.tensors:
            as_json["tensors"] = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in tensors.items()}
        print(json.dumps({"path": home, **as_json}, indent=2))
        return 0
    if tensors:
        rows = [(name, dtype, str(shape)) for name, (shape, dtype) in tensors.items()]
        lines += [f"tensors: {len(tensors)}", _text.table(rows)]
    print("\n".join([home, *lines]))
    return 0


def _tensors(home: str) -> dict[str, tuple[list[int], str]]:
    """Returns path of a tensor -> its shape and dtype; for another format, only the tensors of the first model."""
    from paceline_lens.checkpoint.difference import side

    tensors = {}
    for name, (shape, dtype) in sorted(side(home).facts.items()):
        tensors[name] = list(shape), str(dtype).removeprefix("torch.")
    return tensors


def _facts(manifest: Manifest) -> list[str]:
    from paceline_lens.checkpoint.listing import plan_in_short

    rows = [
        ("step", str(manifest.step)),
        ("saved", f"{_text.moment(manifest.created)} ({_text.age(manifest.created)})"),
        ("by", f"{manifest.world_size} ranks, Paceline {manifest.paceline}, torch {manifest.torch}"),
        ("plan", plan_in_short(manifest)),
    ]
    rows += [(name, f"{value:g}") for name, value in manifest.metrics.items()]
    return [_text.table(rows)]


def _plan(plan: dict[str, Any]) -> list[str]:
    """Returns the lines of the settings whose value is not the default, with the source of each."""
    chosen = [decision for decision in plan.get("decisions", ()) if decision["source"] != "default"]
    rows = []
    for decision in chosen:
        origin = decision["where"] or decision["reason"] or decision["source"]
        rows.append((decision["field"], str(decision["value"]), origin))
    return ["chosen:", _text.table(rows)] if rows else []


def _files(manifest: Manifest) -> list[str]:
    total = sum(fact.bytes for fact in manifest.files.values())
    rows = [(name, _text.size(fact.bytes), fact.checksum) for name, fact in sorted(manifest.files.items())]
    return [f"files: {len(rows)}, {_text.size(total)}", _text.table(rows)]
