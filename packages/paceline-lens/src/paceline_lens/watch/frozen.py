"""Writes the page of a run as a single HTML file, which needs no server. The launcher and `paceline watch --freeze` do it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.files import replace_text
from paceline_lens.watch.following import FollowedRun
from paceline_lens.watch.page_files import MODULES, PLOTS, STYLES, page_file

REPORT = "report.html"

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
# Lines of index.html that load a file; the frozen page contains the files themselves.
_FETCHING = re.compile(r"^<(?:link rel=\"stylesheet\"|script src=).*\n", re.MULTILINE)


def frozen_page(snapshot: Mapping[str, Any]) -> str:
    """Returns the page as an HTML text that shows this snapshot.

    Args:
        snapshot: a snapshot of `RunView`, with the series of all names that the page should have.
    """
    # In an element of HTML, "<" could begin its end or a comment. JSON allows an escape for it.
    data = json.dumps(snapshot, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # The modules become one script: `MODULES` lists each after those that it imports, and no two define the same name.
    modules = "".join(page_file(name) for name in MODULES)
    program = _EXPORT.sub("", _IMPORT.sub("", modules))
    plots = page_file(PLOTS)
    # The browser runs only these two scripts and loads nothing, so that no value of the run can do harm.
    allowed = " ".join(f"'sha256-{_digest(text)}'" for text in (plots, program))
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    styles = "\n".join(page_file(name) for name in STYLES)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>\n{styles}</style>\n"
        f'<script type="application/json" id="frozen">{data}</script>\n'
        f"<script>{plots}</script>\n"
        f'<script type="module">{program}</script>\n'
    )
    index = page_file("index.html")
    before, _, after = _FETCHING.sub("", index).partition("</head>")
    return f"{before}{head}</head>{after}"


def write_frozen(snapshot: Mapping[str, Any], path: Path) -> Path:
    """Writes the frozen page, completely or not at all, and returns its path.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, frozen_page(snapshot))
    return path


def freeze_run(folder: str | Path, path: str | Path | None = None) -> Path:
    """Writes the frozen page of a run, with all values that it has logged, and returns the path of the file.

    Args:
        folder: the folder of the run, or of its journal.
        path: the path of the file; None for `report.html` in the run's folder.

    Raises:
        ConfigError: `watch-folder`, `watch-version`.
        OSError: it cannot be written.
    """
    run = FollowedRun(folder)
    names = run.snapshot([])["names"]
    if path is None:
        run_folder = run.folder.parent if run.folder.name == "watch" else run.folder
        path = run_folder / REPORT
    return write_frozen(run.snapshot(names), Path(path))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
