"""Shows which tensors and values of two checkpoints differ, and by how much.

A and B are checkpoints; one of them may be a folder of safetensors, which is compared with the model alone. Exit code 1
where anything differs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline_lens.cli.checkpoint import _text

if TYPE_CHECKING:
    from paceline_lens.checkpoint.difference import Difference, Unlike

_WIDEST = 60


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline checkpoint diff [--atol X] [--json] A B"
    parser.add_argument("first", metavar="A", help="a checkpoint, or a folder with safetensors files")
    parser.add_argument("other", metavar="B", help="the checkpoint or folder to compare with A")
    parser.add_argument(
        "--atol", type=float, default=0.0, metavar="X", help="values that differ by at most X count as equal [0]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from paceline_lens.checkpoint.difference import difference, side

    first = side(args.first)
    other = side(args.other)
    num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in first.facts.values())
    progress = _text.CopyProgress(num_bytes)
    result = difference(first, other, args.atol, progress)
    progress.clear()
    if args.json:
        print(json.dumps(_json(result), indent=2))
    else:
        print("\n".join(_lines(result, args.first, args.other)))
    return 1 if result else 0


def _json(result: Difference) -> dict[str, Any]:
    values = {}
    for name, (a, b) in result.values.items():
        sides = {"a": a, "b": b}
        values[name] = {key: value for key, value in sides.items() if value is not ...}  # `...`: that side lacks it
    only_a, only_b = result.only
    return {
        "compared": result.compared,
        "only": {"a": list(only_a), "b": list(only_b)},
        "tensors": [asdict(tensor) for tensor in result.unlike],
        "values": values,
    }


def _lines(result: Difference, first_path: str, other: str) -> list[str]:
    if not result:
        return [f"the same: {result.compared} tensors, and every value"]
    lines = []
    for names, path in zip(result.only, (first_path, other), strict=True):
        if names:
            lines.append(f"only in {path}: {len(names)} tensors")
            lines += [f"  {name}" for name in names]
    if result.unlike:
        rows = [("tensor", "largest difference", "relative", "values"), *map(_row, result.unlike)]
        lines += [f"tensors: {len(result.unlike)} of {result.compared} differ", _text.table(rows)]
    if result.values:
        values = [("value", "A", "B")]
        values += [(name, _short(a), _short(b)) for name, (a, b) in result.values.items()]
        lines += [f"values: {len(result.values)} differ", _text.table(values)]
    return lines


def _row(tensor: Unlike) -> tuple[str, str, str, str]:
    if tensor.largest is None or tensor.relative is None:
        return tensor.name, f"shape {list(tensor.shapes[0])} and {list(tensor.shapes[1])}", "", ""
    values = str(tensor.count)
    if tensor.dtypes[0] != tensor.dtypes[1]:
        values += f", {' and '.join(tensor.dtypes)}"
    return tensor.name, f"{tensor.largest:.3g}", f"{tensor.relative:.3g}", values


def _short(value: object) -> str:
    text = "-" if value is ... else json.dumps(value)
    if len(text) > _WIDEST:
        return f"{text[: _WIDEST - 4]} ..."
    return text
