"""A run's page frozen to one file, which opens from the disk and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.files import replace_text
from paceline.watch.following import FollowedRun
from paceline.watch.page_files import MODULES, PLOTS, STYLES, page_file

REPORT = "report.html"

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
# Lines of index.html that fetch a file; what they fetch is put in their place.
_FETCHING = re.compile(r"^<(?:link rel=\"stylesheet\"|script src=).*\n", re.MULTILINE)


def frozen_page(snapshot: Mapping[str, Any]) -> str:
    """The page as one HTML text that shows this snapshot.

    Args:
        snapshot: of `RunView`, with the series of all names that the page shall have.
    """
    # "<" can begin the end of the element, or a comment: JSON may write it as a number.
    data = json.dumps(snapshot, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # The modules become one: each stands behind those that it imports, and no two of them use a name for two things.
    modules = "".join(page_file(name) for name in MODULES)
    program = _EXPORT.sub("", _IMPORT.sub("", modules))
    plots = page_file(PLOTS)
    # Whatever a value of the run holds, no other program than these two runs, and nothing is fetched.
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
    """Writes the frozen page, as a whole or not at all, and returns its path.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, frozen_page(snapshot))
    return path


def freeze_run(folder: str | Path, path: str | Path | None = None) -> Path:
    """Writes the frozen page of a run, with all values that it has logged, and returns the file's path.

    Args:
        folder: of the run, or of its journal.
        path: of the file; None for `report.html` in the run's folder.

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
