"""The files of the page, in the folder `page`. There is no build step: the browser runs them as they are."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

# Our modules, each after those that it imports: `frozen.py` joins them in this order.
MODULES = ("format.js", "dom.js", "charts.js", "names.js", "sections.js", "connection.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
PLOTS = "uPlot.iife.min.js"
FILES = ("index.html", *STYLES, PLOTS, *MODULES)


@cache
def page_file(name: str) -> str:
    """Returns the text of one of `FILES`."""
    return files("paceline_lens.watch").joinpath("page", name).read_text(encoding="utf-8")
