"""`Report`: one finished run as one HTML page that needs nothing else: no font, no request.

Sections stand in the order in which they were added. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.charts import Points, line_chart, matrix_chart, plot_script, plot_style, png_uri
from paceline.observe.classes import accuracy, per_class


@dataclass(frozen=True)
class Picture:
    """A classified image. Shape of `pixels`: [height, width] or [height, width, 3], uint8."""

    pixels: Any
    predicted: str
    true: str

    @property
    def right(self) -> bool:
        """Whether the prediction is the truth."""
        return self.predicted == self.true


class Report:
    """Collects sections and writes them as one page.

    Ranks: make it on the main process alone; nothing here communicates.

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
        """A row of the few numbers that matter, large."""
        cards = (f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in values.items())
        self._sections.append(f'<div class="numbers">{"".join(cards)}</div>')

    def curves(self, charts: Mapping[str, Mapping[str, Points]], x_label: str = "", form: str = ".3f") -> None:
        """Line charts, two a row: lines of points (x, y) by name, by the chart's title."""
        cards = (_card(title, line_chart(lines, x_label, form)) for title, lines in charts.items())
        self._sections.append(f'<div class="row">{"".join(cards)}</div>')

    def confusion(self, matrix: np.ndarray[Any, Any], labels: Sequence[str]) -> None:
        """The confusion matrix, and beside it precision, recall and F1 of each class.

        Shape: [classes, classes]; rows are the truth, columns the prediction.
        """
        table = _class_table(matrix, list(labels))
        both = _card("Confusion matrix", matrix_chart(matrix, labels)) + _card("Class by class", table)
        self._sections.append(f'<div class="row">{both}</div>')

    def images(self, title: str, pictures: Iterable[Picture]) -> None:
        """Images with their predicted label; a wrong one is marked and tells the true one too."""
        self._sections.append(_card(title, f'<div class="images">{"".join(map(_figure, pictures))}</div>'))

    def facts(self, values: Mapping[str, Any], title: str = "The run", folded: Mapping[str, str] | None = None) -> None:
        """Names and values, and long texts that unfold, such as the plan."""
        rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in values.items())
        detail = "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
            for name, text in (folded or {}).items()
        )
        self._sections.append(_card(title, f"<dl>{rows}</dl>{detail}"))

    def html(self) -> str:
        """The page as text."""
        style = files("paceline.observe").joinpath("report.css").read_text(encoding="utf-8")
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{plot_style()}\n{style}</style>\n</head>\n<body>\n<main>\n"
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
