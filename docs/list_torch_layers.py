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
    "pp": "`pp`",
    "bf16": "bf16",
    "shard, bf16": "`shard`, bf16",
    "fp16": "fp16",
}
# Columns that only modules have.
OF_MODULES = ("pp", "bf16", "shard, bf16", "fp16")
SEQUENCES = {"cp": "`cp`"}
WIDTHS = {"1": "1 process", "2": "2", "3": "3"}
OF_ALL = {key: text for key, text in PLANS.items() if key not in OF_MODULES}
# Each page, and its tables: the mark where one stands, the kind of things in it, and its columns.
PAGES: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "torch-layers.md": [
        ("modules", "modules", PLANS),
        ("sequences", "modules", SEQUENCES),
        ("optimizers", "optimizers", OF_ALL),
        ("schedulers", "schedulers", OF_ALL),
        ("averages", "averages", OF_ALL),
    ],
    "torch-data.md": [(kind, kind, WIDTHS) for kind in ("samplers", "options", "datasets")],
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


def written(page: str, tables: list[tuple[str, str, dict[str, str]]]) -> str:
    """A page with the tables of today."""
    outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    for mark, kind, columns in tables:
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        # What was tried under none of these plans does not belong into the table.
        tried = {name: by_column for name, by_column in outcomes[kind].items() if by_column.keys() & columns.keys()}
        page = f"{before}{begin}\n\n{table(tried, columns)}\n\n{end}{after}"
    return page


def main() -> int:
    """Writes or checks the pages."""
    differ = False
    for name, tables in PAGES.items():
        path = CONCEPTS / name
        page = path.read_text(encoding="utf-8")
        new = written(page, tables)
        differ |= new != page
        if "--check" not in sys.argv:
            path.write_text(new, encoding="utf-8")
    return int(differ and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
