"""Small pictures as text: line charts and a confusion matrix as SVG, pixels as a PNG data URI. No plotting package.

Colours are CSS variables of the page (`--series-0`, `--good`, `--bad`, ...), so that one picture suits light and dark.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 30
_GAP = 2  # between cells of a matrix
_CELL = 38


def line_chart(series: Mapping[str, Points], x_label: str = "", form: str = ".3g") -> str:
    """A chart of lines with a legend that tells each line's last value.

    Args:
        series: points (x, y) by the line's name; points that are not finite leave a gap.
        form: format of values in the legend and of the points' tooltips.
    """
    finite = [p for points in series.values() for p in points if all(map(math.isfinite, p))]
    if not finite:
        return '<p class="none">no points yet</p>'
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite), 6, whole=True)
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite), 5)
    x_span, y_span = _span([x for x, _ in finite], []), _span([y for _, y in finite], y_ticks)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_span[0]) / (x_span[1] - x_span[0])
        up = (y - y_span[0]) / (y_span[1] - y_span[0])
        return (
            round(_LEFT + right * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="chart">']
    for tick in y_ticks:
        _, y = place(x_span[0], tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" class="tick" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_span[0])
        parts.append(f'<text x="{x}" y="{_HEIGHT - 10}" class="tick" text-anchor="middle">{tick:g}</text>')
    legend = []
    for number, (name, points) in enumerate(series.items()):
        colour = f"var(--series-{number % 4})"
        parts.append(_line(points, place, colour, f"{name}, {x_label}", form))
        last = next((y for x, y in reversed(points) if math.isfinite(y)), None)
        value = "" if last is None else f" <b>{last:{form}}</b>"
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)}{value}</span>')
    parts.append("</svg>")
    return f'<div class="legend">{"".join(legend)}<em>{escape(x_label)}</em></div>' + "".join(parts)


def _line(
    points: Points, place: Callable[[float, float], tuple[float, float]], colour: str, what: str, form: str
) -> str:
    path, dots, pen = [], [], "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        at = place(x, y)
        path.append(f"{pen}{at[0]} {at[1]}")
        pen = "L"
        # The ring is wider than the dot: it catches the pointer, and the browser shows the title.
        tip = escape(f"{what} {x:g}: {y:{form}}")
        dots.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="7" class="hit"><title>{tip}</title></circle>')
        if len(points) <= 40:
            dots.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="2.4" fill="{colour}" class="dot"/>')
    return f'<path d="{" ".join(path)}" stroke="{colour}" class="line"/>' + "".join(dots)


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that span `low` to `high`, about so many."""
    width = (high - low) or abs(high) or 1.0
    raw = width / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, round(step))
        return [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [round(tick * step, 12) for tick in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _span(values: Sequence[float], marks: Sequence[float]) -> tuple[float, float]:
    low, high = min([*values, *marks]), max([*values, *marks])
    return (low, high) if high > low else (low - 0.5, high + 0.5)


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
