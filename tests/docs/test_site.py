"""The built site: strict, grouped by task, searchable from the disk, and its code fits a screen of 1,280 pixels."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_reader import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What fits 1,280 pixels with docs/style.css, measured in Chromium: 121 characters.
COLUMNS = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_strictly(site: Path) -> None:
    assert (site / "reference" / "api.html").exists()


def test_a_page_needs_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8"))
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page


def test_search_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ") and "how-to/debug-a-hang.html" in index
    page = (site / "how-to" / "launch.html").read_text(encoding="utf-8")
    assert 'src="../iframe-worker.js"' in page


def test_decisions_are_reached_by_contributors_alone(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="([^"]+)" class="md-nav__link', page)
    assert "how-to/launch.html" in links
    assert not [link for link in links if link.startswith("adr/")]
    assert (site / "adr" / "index.html").exists()
    assert "docs/adr/index.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_page_for_users_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert not [page for page in pages if not page.startswith("adr/") and navigation.count(f"- {page}\n") != 1]


def test_code_fits_the_page() -> None:
    # What a command prints wraps; code does not.
    for page in sorted(DOCS.rglob("*.md")):
        for block in blocks(page):
            if block.language != "text":
                wide = [line for line in block.text.splitlines() if len(line) > COLUMNS]
                assert not wide, f"{page.name}, line {block.line}: more than {COLUMNS} characters"


def test_the_picture_of_plans_is_the_one_that_is_drawn() -> None:
    spec = importlib.util.spec_from_file_location("draw_plans", DOCS / "draw_plans.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    assert (DOCS / "plans.svg").read_text(encoding="utf-8") == module.draw(), "run python docs/draw_plans.py"
