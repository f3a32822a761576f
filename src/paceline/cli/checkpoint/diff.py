"""Says which tensors and values of two checkpoints differ, and by how much.

A and B are checkpoints; one of them may be a folder of safetensors, which is compared with the model alone. Exit code 1
where anything differs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline.checkpoint.difference import Difference, Unlike

_WIDEST = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes both, `--atol` and `--json`."""
    parser.usage = "paceline checkpoint diff [--atol X] [--json] A B"
    parser.add_argument("one", metavar="A", help="a checkpoint, or a folder of safetensors")
    parser.add_argument("other", metavar="B", help="what it is compared with")
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="values this close count as equal [0]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compares, one tensor of each in memory at a time."""
    from paceline.checkpoint.difference import difference, side

    one, other = side(args.one), side(args.other)
    progress = _text.Progress(sum(shape.numel() * dtype.itemsize for shape, dtype in one.facts.values()))
    found = difference(one, other, args.atol, progress)
    progress.clear()
    print(json.dumps(_json(found), indent=2) if args.json else "\n".join(_lines(found, args.one, args.other)))
    return 1 if found else 0


def _json(found: Difference) -> dict[str, Any]:
    sides = ("a", "b")
    return {
        "compared": found.compared,
        "only": dict(zip(sides, map(list, found.only), strict=True)),
        "tensors": [asdict(each) for each in found.unlike],
        "values": {
            name: {key: value for key, value in zip(sides, pair, strict=True) if value is not ...}
            for name, pair in found.values.items()
        },
    }


def _lines(found: Difference, one: str, other: str) -> list[str]:
    if not found:
        return [f"the same: {found.compared} tensors, and every value"]
    lines = []
    for names, path in zip(found.only, (one, other), strict=True):
        if names:
            lines += [f"only in {path}: {len(names)} tensors", *(f"  {name}" for name in names)]
    if found.unlike:
        rows = [("tensor", "largest difference", "relative", "values"), *map(_row, found.unlike)]
        lines += [f"tensors: {len(found.unlike)} of {found.compared} differ", _text.table(rows, "  ")]
    if found.values:
        values = [("value", "A", "B")]
        values += [(name, _short(a), _short(b)) for name, (a, b) in found.values.items()]
        lines += [f"values: {len(found.values)} differ", _text.table(values, "  ")]
    return lines


def _row(each: Unlike) -> tuple[str, str, str, str]:
    if each.largest is None or each.relative is None:
        return each.name, f"shape {list(each.shapes[0])} and {list(each.shapes[1])}", "", ""
    kinds = f"{each.count}" if each.dtypes[0] == each.dtypes[1] else f"{each.count}, {' and '.join(each.dtypes)}"
    return each.name, f"{each.largest:.3g}", f"{each.relative:.3g}", kinds


def _short(value: Any) -> str:
    text = "-" if value is ... else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 4]} ..."
