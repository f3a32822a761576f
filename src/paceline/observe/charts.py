"""Small pictures as text: line charts that uPlot draws, a confusion matrix as SVG, pixels as a PNG data URI.

Colours are CSS variables of the page (`--series-0`, `--good`, `--bad`, ...), so that one picture suits light and dark.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.watch.page_files import PLOTS, page_file

Points = Sequence[tuple[float, float]]

_GAP = 2  # between cells of a matrix
_CELL = 38


def line_chart(series: Mapping[str, Points], x_label: str = "", form: str = ".3g") -> str:
    """A chart of lines, which uPlot draws on a page with `plot_script`, and a legend that tells each line's last value.

    Args:
        series: points (x, y) by the line's name; points that are not finite leave a gap.
        form: format of the values: ".3f", ".3g", ".1%" or the like.
    """
    if not any(math.isfinite(x) and math.isfinite(y) for points in series.values() for x, y in points):
        return '<p class="none">no points yet</p>'
    legend = []
    for number, (name, points) in enumerate(series.items()):
        last = next((y for _, y in reversed(points) if math.isfinite(y)), None)
        value = "" if last is None else f"{last:{form}}"
        colour = f"var(--series-{number % 4})"
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)} <b>{value}</b></span>')
    lines = {
        "names": list(series),
        "tables": [_table(points) for points in series.values()],
        "form": form,
        "label": x_label,
    }
    data = json.dumps(lines, allow_nan=False).replace("<", "\\u003c")
    described = escape(f"{', '.join(series)} by {x_label or 'number'}")
    return (
        f'<div class="legend">{"".join(legend)}<em>{escape(x_label)}</em></div>'
        f'<div class="plot" role="img" aria-label="{described}"><script type="application/json">{data}</script></div>'
    )


def _table(points: Points) -> list[list[float | None]]:
    """The columns x and y, by x. What is not finite is a gap in y; a point whose x is not is left out."""
    column_x: list[float | None] = []
    column_y: list[float | None] = []
    placed = [point for point in points if math.isfinite(point[0])]
    for x, y in sorted(placed, key=lambda point: point[0]):
        column_x.append(x)
        column_y.append(y if math.isfinite(y) else None)
    return [column_x, column_y]


def plot_style() -> str:
    """What the style of a page with line charts needs besides its own."""
    return page_file("uPlot.min.css")


def plot_script() -> str:
    """The end of a page with line charts: what draws them. Nothing is fetched."""
    ours = files("paceline.observe").joinpath("plots.js").read_text(encoding="utf-8")
    return f'<script>{page_file(PLOTS)}</script>\n<script type="module">{ours}</script>'


def matrix_chart(matrix: np.ndarray[Any, Any], labels: Sequence[str]) -> str:
    """A confusion matrix: right in one colour, wrong in another, each as deep as its share of the row."""
    size = len(labels)
    longest = max((len(label) for label in labels), default=1)
    slanted = longest > 4  # such names do not fit above a column
    left, top = 16 + 8 * longest, 24 + (5 * longest if slanted else 0)
    wide, high = left + size * (_CELL + _GAP) + (4 * longest if slanted else 0), top + size * (_CELL + _GAP)
    parts = [
        '<div class="legend">rows: true, columns: predicted</div>',
        f'<svg viewBox="0 0 {wide} {high}" class="matrix" style="max-width:{1.1 * wide:.0f}px">',
    ]
    for row, label in enumerate(labels):
        middle = row * (_CELL + _GAP) + _CELL / 2
        name = escape(label)
        parts.append(f'<text x="{left - 8}" y="{top + middle + 4.5}" text-anchor="end">{name}</text>')
        turn = 'rotate(-45)" text-anchor="start' if slanted else '" text-anchor="middle'
        parts.append(f'<text transform="translate({left + middle} {top - 8}) {turn}">{name}</text>')
        total = int(matrix[row].sum())
        for column in range(size):
            count = int(matrix[row, column])
            x, y = left + column * (_CELL + _GAP), top + row * (_CELL + _GAP)
            parts.append(_cell(x, y, count, total, row == column, f"{label} taken for {labels[column]}: {count}"))
    return "".join(parts) + "</svg>"


def _cell(x: int, y: int, count: int, total: int, right: bool, tip: str) -> str:
    share = count / total if total else 0.0
    # The root lifts single mistakes out of the ground.
    depth = 0.85 * share if right else min(1.0, 0.25 + 0.75 * math.sqrt(share))
    colour = "var(--good)" if right else "var(--bad)"
    if not count:
        colour, depth = "var(--faint)", 0.5
    kind = "number strong" if count and depth > 0.55 else "number"
    shown = (
        f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4.5}" class="{kind}" text-anchor="middle">{count}</text>'
        if count
        else ""
    )
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="5" '
        f'fill="{colour}" fill-opacity="{depth:.2f}"/>{shown}</g>'
    )


def png_uri(pixels: ArrayLike) -> str:
    """Pixels as a data URI of a PNG.

    Shape: [height, width] of grey or [height, width, 3] of red, green, blue; uint8.
    """
    array = np.ascontiguousarray(pixels, dtype=np.uint8)
    height, width = array.shape[:2]
    rows = array.reshape(height, -1)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if array.ndim == 3 else 0, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(filtered, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
