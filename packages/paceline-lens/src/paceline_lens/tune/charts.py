"""Line charts that uPlot draws, as text for a page of HTML that needs nothing else.

Colours are CSS variables of the page (`--series-0`, `--good`, `--bad`, ...), so that one picture suits light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain

from paceline_lens.watch.page_files import PLOTS, page_file

Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], x_label: str = "", form: str = ".3g") -> str:
    """Returns a line chart, which uPlot draws on a page with `plot_script`, and a legend with the last value of each line.

    Args:
        series: points (x, y) by the line's name; points that are not finite leave a gap.
        form: format of the values: ".3f", ".3g", ".1%" or the like.
    """
    all_points = chain.from_iterable(series.values())
    if not any(math.isfinite(x) and math.isfinite(y) for x, y in all_points):
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
    """Returns the columns x and y, sorted by x. A y that is not finite becomes a gap; points with such an x are left out."""
    column_x: list[float | None] = []
    column_y: list[float | None] = []
    placed = [point for point in points if math.isfinite(point[0])]
    for x, y in sorted(placed, key=lambda point: point[0]):
        column_x.append(x)
        column_y.append(y if math.isfinite(y) else None)
    return [column_x, column_y]


def page_style() -> str:
    """Returns the style sheet of a page with line charts."""
    ours = files("paceline_lens.tune").joinpath("report.css").read_text(encoding="utf-8")
    return f"{page_file('uPlot.min.css')}\n{ours}"


def plot_script() -> str:
    """Returns the scripts that draw the charts, for the end of a page. The page loads nothing from elsewhere."""
    ours = files("paceline_lens.tune").joinpath("plots.js").read_text(encoding="utf-8")
    return f'<script>{page_file(PLOTS)}</script>\n<script type="module">{ours}</script>'
