"""Every code block of the README and the documentation runs.

The blocks of a page run in order, as a reader would type them: in one folder, the Python ones in one session.

    ```python                    runs
    ```python title="train.py"   is written to a file that a later block must use; so is yaml, which has a title
    ```bash                      runs; it must end well
    ```text title="prints"       is what the block before it printed, exactly
    <!-- not run: REASON -->     directly above a block: it is not run
"""

from __future__ import annotations

import io
import linecache
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch  # noqa: F401  (each page runs in a fork of this process: torch is imported once)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z", re.DOTALL)
SECONDS = 240


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, title, text, first line on the page, and why it is not run, if it is not."""

    language: str
    title: str
    text: str
    line: int
    skipped: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        reason = NOT_RUN.search(text[: match.start()])
        found.append(
            Block(
                language=language,
                title=title[1] if title else "",
                text=textwrap.dedent(match["text"]),
                line=text.count("\n", 0, match.start()) + 2,
                skipped=reason["reason"] if reason else "",
            )
        )
    return found


class Reader:
    """Someone who types a page's blocks one after the other."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.printed = ""
        self.main = ModuleType("__main__")

    def read(self, found: list[Block]) -> None:
        """Runs the blocks; raises at the first that fails."""
        os.chdir(self.folder)
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        sys.modules["__main__"] = self.main
        sys.path.insert(0, str(self.folder))
        for block in found:
            if block.language == "text" and block.title == "prints":
                expected, got = block.text.strip(), self.printed.strip()
                assert got == expected, f"line {block.line} promises\n{expected}\nbut this was printed:\n{got}"
            elif block.skipped or block.language not in ("python", "bash", "yaml"):
                continue
            elif block.title:
                path = self.folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                self._python(block)
            else:
                self._bash(block)

    def _python(self, block: Block) -> None:
        output = io.StringIO()
        name = str(self.page)
        linecache.checkcache(name)
        with redirect_stdout(output):
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), self.main.__dict__)
        self.printed = output.getvalue()

    def _bash(self, block: Block) -> None:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True)
        assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout


def _follow(page: Path, folder: Path, report: Path) -> None:
    """Runs a page in a process of its own; what went wrong is left in `report`."""
    os.setsid()  # what the page starts can be ended with it
    with report.open("w", encoding="utf-8") as file, redirect_stderr(file):
        try:
            Reader(page, folder).read(blocks(page))
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)
    os._exit(0)


def has_code(page: Path) -> bool:
    return any(block.language in ("python", "bash", "yaml") and not block.skipped for block in blocks(page))


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if has_code(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    folder, report = tmp_path / "work", tmp_path / "report"
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(target=_follow, args=(page, folder, report))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of threads, which the child does not use
        process.start()
    process.join(SECONDS)
    if process.is_alive():
        os.killpg(process.pid, 9)
        process.join()
        pytest.fail(f"{page.name} did not end within {SECONDS} s")
    assert process.exitcode == 0, report.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_well_formed(page: Path) -> None:
    found = blocks(page)
    fences = len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert fences == 2 * len(found), "a fence is not closed, or is nested"
    for at, block in enumerate(found):
        where = f"line {block.line}"
        assert block.language, f"{where}: say the language; `text` for plain text"
        assert block.language != "yaml" or block.title or block.skipped, f"{where}: name the file: title=..."
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
