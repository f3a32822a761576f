"""Draws `plans.svg`: what each of two ranks holds under each plan, and the peak that was measured.

python docs/draw_plans.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RANKS = 2
# Bytes a parameter of a float32 model under Adam.
PARTS = {"parameters": 4, "gradients": 4, "optimizer state": 8}
PIXELS_A_BYTE = 24
BAR_HEIGHT, BAR_GAP, PLAN_GAP = 15, 3, 17
LEFT, TOP, WIDTH = 150, 46, 720
STYLE = """
text { fill: #24292f; } .quiet { fill: #656d76; } .missing { fill: none; stroke: #afb8c1; stroke-dasharray: 3 3; }
.part0 { fill: #4f7fd9; } .part1 { fill: #d98a35; } .part2 { fill: #4aa37c; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .quiet { fill: #9198a1; } .missing { stroke: #59626c; } }
"""


@dataclass(frozen=True)
class Plan:
    """A plan, the parts of the state that it divides, and its measured peak in bytes a parameter."""

    name: str
    divided: tuple[str, ...]
    peak: float


# Peaks: benchmarks/reports/2026-11-21-plans.md.
PLANS = (
    Plan("replicate", (), 16.5),
    Plan("--zero 1", ("optimizer state",), 12.5),
    Plan("--zero 2", ("optimizer state", "gradients"), 11.7),
    Plan("--zero 3", ("optimizer state", "gradients", "parameters"), 10.0),
)


def draw() -> str:
    """The picture as SVG."""
    lines = [f'<text x="{LEFT}" y="18" class="quiet">bytes a parameter (float32, Adam):</text>']
    x = LEFT + 215
    for number, name in enumerate(PARTS):
        lines.append(
            f'<rect x="{x}" y="8" width="12" height="12" class="part{number}"/><text x="{x + 17}" y="18">{name}</text>'
        )
        x += 100
    y = TOP
    for plan in PLANS:
        lines += _plan(plan, y)
        y += RANKS * (BAR_HEIGHT + BAR_GAP) + PLAN_GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 4}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>"]) + "\n"


def _plan(plan: Plan, top: int) -> list[str]:
    """The bars of all ranks: a part that is divided is filled where this rank holds it."""
    middle = top + BAR_HEIGHT + BAR_GAP // 2
    lines = [f'<text x="8" y="{middle + 4}" font-family="monospace" font-weight="bold">{plan.name}</text>']
    held = sum(size / (RANKS if name in plan.divided else 1) for name, size in PARTS.items())
    for rank in range(RANKS):
        y = top + rank * (BAR_HEIGHT + BAR_GAP)
        lines.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" class="quiet">rank {rank}</text>')
        x = LEFT
        for number, (name, size) in enumerate(PARTS.items()):
            width = size * PIXELS_A_BYTE
            lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="{BAR_HEIGHT}" class="missing"/>')
            share = width // RANKS if name in plan.divided else width
            start = x + rank * share if name in plan.divided else x
            lines.append(f'<rect x="{start}" y="{y}" width="{share}" height="{BAR_HEIGHT}" class="part{number}"/>')
            x += width
    right = LEFT + sum(PARTS.values()) * PIXELS_A_BYTE + 14
    lines.append(
        f'<text x="{right}" y="{middle - 3}"><tspan font-weight="bold">{held:.0f}</tspan> between steps</text>'
    )
    lines.append(f'<text x="{right}" y="{middle + 14}" class="quiet">{plan.peak} at the peak</text>')
    return lines


if __name__ == "__main__":
    Path(__file__).with_name("plans.svg").write_text(draw(), encoding="utf-8")
