"""Writes the table of torch's layers, optimizers and schedulers from the outcomes that the sweep has seen.

python docs/list_torch_layers.py          writes
python docs/list_torch_layers.py --check  says whether the page is as it would be written; exit code 1 where not

`make sweep` runs everything and writes the outcomes (tests/torch_sweep/outcomes.json), then this page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "concepts" / "torch-layers.md"
OUTCOMES = Path(__file__).parent.parent / "tests" / "torch_sweep" / "outcomes.json"
PLANS = ("replicate", "zero 1", "zero 2", "shard")


def cell(outcome: str) -> str:
    """An outcome as it stands in the table: codes are links to their explanations."""
    return re.sub(r"refused ([a-z0-9-]+)", r"[\1](../errors.md#\1)", outcome)


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """The rows of one table; those that are exact under every plan are listed together below it."""
    lines = ["| | replicate | `zero=1` | `zero=2` | `shard` |", "|---|---|---|---|---|"]
    exact = []
    for name, by_plan in outcomes.items():
        if set(by_plan.values()) == {"exact"} and set(by_plan) == set(PLANS):
            exact.append(f"`{name}`")
        else:
            lines.append(f"| `{name}` | " + " | ".join(cell(by_plan.get(plan, "not tried")) for plan in PLANS) + " |")
    text = f"Exact under every plan: {', '.join(exact)}."
    if len(lines) > 2:
        text = "\n".join(lines) + "\n\n" + text
    return text


def written(page: str) -> str:
    """The page with the tables of today."""
    for kind, outcomes in json.loads(OUTCOMES.read_text(encoding="utf-8")).items():
        begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{table(outcomes)}\n\n{end}{after}"
    return page


def main() -> int:
    """Writes or checks the page."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(written(page) != page)
    PAGE.write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
