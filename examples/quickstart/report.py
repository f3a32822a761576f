"""The report of the quickstart: numbers, curves, the confusion matrix and pictures in one HTML file that loads nothing else.

Sections appear in the order in which they were added. Every text is escaped. Colours are CSS variables of the page
(`--series-0`, `--good`, `--bad`, ...), so a picture works in light and in dark mode.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline_lens.tune.charts import Points, line_chart, page_style, plot_script

_GAP = 2  # between cells of a matrix
_CELL = 38


@dataclass(frozen=True)
class ClassRow:
    """One class of a report. A share is 0 if it is not defined (no such sample, or never predicted)."""

    label: str
    precision: float
    recall: float
    f1: float
    samples: int


def confusion_matrix(truth: ArrayLike, predicted: ArrayLike, classes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counts of (true class, predicted class).

    Args:
        truth, predicted: class numbers from 0 to classes - 1, shape [n]; tensors, arrays or lists.

    Shape: [classes, classes]; rows are the truth, columns the prediction.

    Raises:
        ValueError: for unequal lengths or a number outside the range.
    """
    rows, columns = (np.asarray(numbers, dtype=np.int64).ravel() for numbers in (truth, predicted))
    both = np.concatenate([rows, columns])
    if len(rows) != len(columns) or (len(both) and not (both.min() >= 0 and both.max() < classes)):
        span = f"{both.min()} to {both.max()}" if len(both) else "none"
        raise ValueError(
            f"these are not the true and predicted classes of the same samples: {len(rows)} true and {len(columns)} "
            f"predicted ones, numbers {span}, {classes} classes"
        )
    return np.bincount(rows * classes + columns, minlength=classes * classes).reshape(classes, classes)


def per_class(matrix: np.ndarray[Any, Any], labels: list[str]) -> list[ClassRow]:
    """Precision, recall and F1 of each class of a confusion matrix."""
    right, guessed, there = matrix.diagonal(), matrix.sum(axis=0), matrix.sum(axis=1)
    return [
        ClassRow(
            label,
            precision=_share(right[k], guessed[k]),
            recall=_share(right[k], there[k]),
            f1=_share(2 * right[k], guessed[k] + there[k]),
            samples=int(there[k]),
        )
        for k, label in enumerate(labels)
    ]


def accuracy(matrix: np.ndarray[Any, Any]) -> float:
    """The share of all samples on the diagonal of the matrix."""
    return _share(matrix.trace(), matrix.sum())


def _share(part: np.integer[Any] | int, whole: np.integer[Any] | int) -> float:
    return float(part) / float(whole) if whole else 0.0


@dataclass(frozen=True)
class Picture:
    """A classified image. Shape of `pixels`: [height, width] or [height, width, 3], uint8."""

    pixels: Any
    predicted: str
    true: str

    @property
    def right(self) -> bool:
        """Whether the prediction is correct."""
        return self.predicted == self.true


class Report:
    """Collects sections and writes them as one page.

    Ranks: create it only on the main process; nothing here communicates.

    Example:
        report = Report("Handwritten digits", "12 epochs on 2 processes")
        report.curves({"Loss": {"training": [(1, 0.9), (2, 0.4)]}}, x_label="epoch")
        report.confusion(matrix, [str(digit) for digit in range(10)])
        report.write("runs/digits/report.html")
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self.lead = lead
        self._sections: list[str] = []

    def numbers(self, values: Mapping[str, str]) -> None:
        """Adds a row with the most important numbers in large type."""
        cards = (f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in values.items())
        self._sections.append(f'<div class="numbers">{"".join(cards)}</div>')

    def curves(self, charts: Mapping[str, Mapping[str, Points]], x_label: str = "", form: str = ".3f") -> None:
        """Adds line charts, two in a row. For each title: the points (x, y) of each line by its name."""
        cards = (_card(title, line_chart(lines, x_label, form)) for title, lines in charts.items())
        self._sections.append(f'<div class="row">{"".join(cards)}</div>')

    def confusion(self, matrix: np.ndarray[Any, Any], labels: Sequence[str]) -> None:
        """Adds the confusion matrix, and next to it precision, recall and F1 of each class.

        Shape: [classes, classes]; rows are the truth, columns the prediction.
        """
        table = _class_table(matrix, list(labels))
        both = _card("Confusion matrix", matrix_chart(matrix, labels)) + _card("Class by class", table)
        self._sections.append(f'<div class="row">{both}</div>')

    def images(self, title: str, pictures: Iterable[Picture]) -> None:
        """Adds images with their predicted labels; a wrong label is marked, and the true one is shown too."""
        self._sections.append(_card(title, f'<div class="images">{"".join(map(_figure, pictures))}</div>'))

    def facts(self, values: Mapping[str, Any], title: str = "The run", folded: Mapping[str, str] | None = None) -> None:
        """Adds names and values, and long texts that can be opened, such as the plan."""
        rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in values.items())
        detail = "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
            for name, text in (folded or {}).items()
        )
        self._sections.append(_card(title, f"<dl>{rows}</dl>{detail}"))

    def html(self) -> str:
        """The page as text."""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{page_style()}</style>\n</head>\n<body>\n<main>\n"
            f'<h1>{escape(self.title)}</h1>\n<p class="lead">{escape(self.lead)}</p>\n'
            + "\n".join(self._sections)
            + f"\n</main>\n{plot_script()}\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page, making its folder; returns its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html(), encoding="utf-8")
        return target


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def _class_table(matrix: np.ndarray[Any, Any], labels: list[str]) -> str:
    rows = [
        f'<tr><td>{escape(row.label)}</td><td><span class="bar"><i style="width:{100 * row.recall:.0f}%"></i></span>'
        f"{row.recall:.3f}</td><td>{row.precision:.3f}</td><td>{row.f1:.3f}</td><td>{row.samples}</td></tr>"
        for row in per_class(matrix, labels)
    ]
    total = (
        f'<tr class="total"><td>all</td><td>{accuracy(matrix):.3f}</td><td></td><td></td><td>{matrix.sum()}</td></tr>'
    )
    head = "".join(f"<th>{name}</th>" for name in ("class", "recall", "precision", "F1", "samples"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}{total}</tbody></table>"


def _figure(picture: Picture) -> str:
    image = f'<img src="{png_uri(picture.pixels)}" alt="{escape(picture.true)}">'
    if picture.right:
        return f"<figure>{image}<b>{escape(picture.predicted)}</b></figure>"
    true = escape(picture.true)
    return f'<figure class="wrong">{image}<b>{escape(picture.predicted)}</b> · is {true}</figure>'


def matrix_chart(matrix: np.ndarray[Any, Any], labels: Sequence[str]) -> str:
    """A confusion matrix with one colour for correct and one for wrong predictions; the intensity is the share of the row."""
    size = len(labels)
    longest = max((len(label) for label in labels), default=1)
    slanted = longest > 4  # longer names do not fit above a column
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
    # With the square root, single mistakes remain visible.
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
