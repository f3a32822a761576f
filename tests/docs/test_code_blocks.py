"""Every code block of the README and the documentation runs; `page_reader.py` says how.

A page runs where it has changed (`choose_tests.py`), and all do each night and before a release; `make test-all` has those that
`long_cases.py` keeps.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import page_reader
import pytest
import warm_python
from page_reader import blocks, has_code

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Read with the commands of the environment itself, as a user has them; all others start in forks of one warm process.
COLD = {ROOT / "docs" / "tutorial" / "first-run.md", ROOT / "docs" / "tutorial" / "notebook.md"}
SECONDS = 240


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if has_code(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    executable = sys.executable if page in COLD else warm_python.executable()
    # Commands such as `torchrun` are those of the environment in any case.
    folders = [os.path.dirname(executable), os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    folder, report = tmp_path / "work", tmp_path / "report"
    folder.mkdir()
    with report.open("w") as file:
        words = [executable, page_reader.__file__, str(page)]
        reader = subprocess.Popen(words, cwd=folder, env=environment, stderr=file, start_new_session=True)
        try:
            reader.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(reader.pid, signal.SIGKILL)  # with all that the page has started
            reader.wait()
            raise
    assert reader.returncode == 0, report.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_well_formed(page: Path) -> None:
    found = blocks(page)
    fences = len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert fences == 2 * len(found), "a fence is not closed, or is nested"
    for at, block in enumerate(found):
        where = f"line {block.line}"
        assert block.language, f"{where}: say the language; `text` for plain text"
        assert block.language not in ("yaml", "diff") or block.title or block.skipped, (
            f"{where}: name the file: title=..."
        )
        if block.title == "prints":
            before = found[at - 1] if at else None
            assert before and before.language in ("python", "bash") and not before.skipped, f"{where}: printed by what?"
        elif block.title and not block.skipped:
            later = "".join(other.text for other in found[at + 1 :] if not other.skipped)
            module = Path(block.title).stem
            assert block.title in later or f"import {module}" in later, f"{where}: nothing uses {block.title}"


def test_exceptions_have_a_reason() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marks = len(re.findall("<!-- not run", text))
        used = [block for block in blocks(page) if block.skipped]
        assert marks == len(used), f"{page.name}: a mark that stands above no block, or without a reason"
        assert all(len(block.skipped.split()) >= 3 for block in used), f"{page.name}: say why"
