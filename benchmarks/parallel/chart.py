"""Draws the tables of `memory.py` as an SVG: bars at rest, a line to the peak, a mark at the formula.

python benchmarks/memory.py | tee memory.md; python benchmarks/parallel/chart.py memory.md docs/how-to/memory.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

BAR, LEFT, SCALE, TOP = 22, 250, 19, 44  # heights and widths in pixels; SCALE pixels are one byte a parameter
OURS, OTHERS = "#3f6fb5", "#9aa3ad"


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Heading and rows of each table."""
    found: list[tuple[str, list[list[str]]]] = []
    for line in text.splitlines():
        if line.startswith("**"):
            found.append((line.split("**")[1], []))
        elif line.startswith("| ") and not line.startswith(("| what", "| ---")):
            found[-1][1].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def draw(heading: str, rows: list[list[str]], y: int) -> tuple[list[str], int]:
    """The lines of one table's chart, which begins at `y`, and where it ends."""
    out = [f'<text x="8" y="{y}" font-weight="bold">{heading}</text>']
    y += 12
    for name, _, formula, rest, peak, said, _ in rows:
        middle, color = y + BAR // 2, OURS if said else OTHERS
        width, most, mark = (round(float(value) * SCALE) for value in (rest, peak, formula))
        out += [
            f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{width}" height="{BAR - 7}" fill="{color}"/>',
            f'<path d="M{LEFT + width} {middle}H{LEFT + most}m0 -5v10" stroke="{color}" fill="none"/>',
            f'<path d="M{LEFT + mark} {y + 1}v{BAR - 3}" stroke="#c0392b" stroke-width="2"/>',
            f'<text x="{LEFT + max(most, mark) + 8}" y="{middle + 4}" fill="#777">{rest}, peak {peak}</text>',
        ]
        y += BAR
    return out, y + 30


def main() -> None:
    lines, y = [], TOP
    for heading, rows in tables(Path(sys.argv[1]).read_text()):
        drawn, y = draw(heading, rows, y)
        lines += drawn
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 {y}" font-family="sans-serif" font-size="12" '
        'fill="#555">'
    )
    title = '<text x="8" y="18">bytes a parameter: bar at rest, line to the peak of a step, red mark the formula</text>'
    Path(sys.argv[2]).write_text("\n".join([head, title, *lines, "</svg>", ""]))


if __name__ == "__main__":
    main()
