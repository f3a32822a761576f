"""Writes the table of `concepts/gradient-scale.md`: where and when each strategy averages gradients.

python docs/gradient_table.py
"""

from __future__ import annotations

from pathlib import Path

from paceline.parallel.strategy import STRATEGIES

PAGE = Path(__file__).parent / "concepts" / "gradient-scale.md"
MARK = "<!-- gradient table -->\n\n"


def table() -> str:
    """One row for each strategy, in the order in which they are applied."""
    lines = ["| strategy | over the ranks along | when | `.grad` afterwards |", "|---|---|---|---|"]
    for strategy in sorted(STRATEGIES, key=lambda strategy: (strategy.stage, strategy.name)):
        averaging = strategy.averaging
        if averaging is None:
            lines.append(f"| `{strategy.name}` | averages nothing | | |")
        else:
            lines.append(f"| `{strategy.name}` | {averaging.over} | {averaging.when} | {averaging.result} |")
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(MARK)
    rest = after.partition("\n\n")[2]
    PAGE.write_text(f"{before}{MARK}{table()}\n\n{rest}")
