"""Writes the tables of torch's layers, optimizers, schedulers and loaders from the outcomes that the sweep has seen.

python docs/list_torch_layers.py          writes
python docs/list_torch_layers.py --check  says whether the pages are as they would be written; exit code 1 where not

`make sweep` runs everything and writes the outcomes (tests/torch_sweep/outcomes.json), then these pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

CONCEPTS = Path(__file__).parent / "concepts"
OUTCOMES = Path(__file__).parent.parent / "tests" / "torch_sweep" / "outcomes.json"
PLANS = {
    "one process": "one process",
    "replicate": "replicate",
    "zero 1": "`zero=1`",
    "zero 2": "`zero=2`",
    "shard": "`shard`",
    "tp": "`tp`",
    "recompute": "`recompute`",
    "bf16": "bf16",
}
# A column that only some kinds have.
OF_KINDS = {"bf16": ("modules",)}
WIDTHS = {"1": "1 process", "2": "2", "3": "3"}
# Each page, the columns of its tables, and the kinds of things in them.
PAGES = {
    "torch-layers.md": (PLANS, ("modules", "optimizers", "schedulers", "averages")),
    "torch-data.md": (WIDTHS, ("samplers", "options", "datasets")),
}


def cell(outcome: str) -> str:
    """An outcome as it stands in the table: codes are links to their explanations."""
    return re.sub(r"refused ([a-z0-9-]+)", r"[\1](../errors.md#\1)", outcome)


def table(outcomes: dict[str, dict[str, str]], columns: dict[str, str]) -> str:
    """The rows of one table, one for all things with the same outcomes; what is exact everywhere is listed below it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, by_column in outcomes.items():
        row = tuple(cell(by_column.get(column, "not tried")) for column in columns)
        names.setdefault(row, []).append(f"`{name}`")
    exact = names.pop(("exact",) * len(columns), [])
    text = f"Exact everywhere: {', '.join(exact)}."
    if names:
        lines = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {', '.join(alike)} | {' | '.join(row)} |" for row, alike in names.items()]
        text = "\n".join(lines) + "\n\n" + text
    return text


def columns_of(kind: str, columns: dict[str, str]) -> dict[str, str]:
    """The columns without those that this kind of things does not have."""
    return {key: text for key, text in columns.items() if kind in OF_KINDS.get(key, (kind,))}


def written(page: str, columns: dict[str, str], kinds: tuple[str, ...]) -> str:
    """A page with the tables of today."""
    outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    for kind in kinds:
        begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{table(outcomes[kind], columns_of(kind, columns))}\n\n{end}{after}"
    return page


def main() -> int:
    """Writes or checks the pages."""
    differ = False
    for name, (columns, kinds) in PAGES.items():
        path = CONCEPTS / name
        page = path.read_text(encoding="utf-8")
        new = written(page, columns, kinds)
        differ |= new != page
        if "--check" not in sys.argv:
            path.write_text(new, encoding="utf-8")
    return int(differ and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
