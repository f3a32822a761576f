"""The files that the page is made of, as they lie in the folder `page`; the browser runs them as they are."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

# Each module of ours after those that it imports.
MODULES = ("format.js", "dom.js", "charts.js", "names.js", "sections.js", "connection.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
PLOTS = "uPlot.iife.min.js"
FILES = ("index.html", *STYLES, PLOTS, *MODULES)


@cache
def page_file(name: str) -> str:
    """Text of one of `FILES`."""
    return files("paceline.watch").joinpath("page", name).read_text(encoding="utf-8")
