"""Prints a row for each package from the figures of `coverage json`.

python dev/coverage_by_package.py .coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

CORE = "packages/paceline/src/paceline/"


def rows(figures: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """One row for each package and one for all.

    Args:
        figures: path of a file -> what `coverage json` says of it under "files".
    """
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for path, figure in figures.items():
        inside = path.partition(CORE)[2]
        package = inside.partition("/")[0] if "/" in inside else "(files of the folder itself)"
        if not inside:  # of another part
            package = path.partition("packages/")[2].partition("/")[0]
        for name in (package, "all"):
            totals[name].update(figure["summary"])
    lines = ["| package | lines | reached | branches | reached |", "|---|---|---|---|---|"]
    for name in sorted(totals, key=lambda name: (name == "all", name)):
        total = totals[name]
        lines.append(
            f"| {name} | {total['num_statements']} | {share(total['covered_lines'], total['num_statements'])} "
            f"| {total['num_branches']} | {share(total['covered_branches'], total['num_branches'])} |"
        )
    return lines


def share(part: int, whole: int) -> str:
    """Percent of the whole."""
    return f"{part / whole:.1%}" if whole else ""


if __name__ == "__main__":
    print("\n".join(rows(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"])))
