"""The built site: strict, grouped by task, searchable from the disk, and its code fits a screen of 1,280 pixels."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from page_reader import blocks

from paceline.cli.main import commands, parser_for

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


def script(name: str) -> ModuleType:
    """A script of `docs/`, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def diagrams() -> ModuleType:
    """The script that draws the pictures."""
    return script("draw_diagrams")


def test_pictures_are_those_that_are_drawn(diagrams: ModuleType) -> None:
    drawn = diagrams.draw()
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "diagrams").glob("*.svg")}
    assert committed == drawn, "run python docs/draw_diagrams.py"


def test_pictures_say_what_they_show_and_ask_for_nothing_from_elsewhere(diagrams: ModuleType) -> None:
    for name, svg in diagrams.draw().items():
        root = ElementTree.fromstring(svg)
        words = {child.tag.rpartition("}")[2]: child.text for child in root}
        assert words["title"] and words["desc"], name
        assert int(root.get("width")) <= 420, f"{name}: a phone shows it too small"
        assert svg.count("http") == 1 and "prefers-color-scheme: dark" in svg, name
        assert any(f"diagrams/{name}" in page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")), name


def test_a_picture_refuses_text_that_leaves_it(diagrams: ModuleType) -> None:
    picture = diagrams.Picture("title", "description")
    with pytest.raises(ValueError, match="does not fit"):
        picture.text(10, 10, "x" * 80)
    with pytest.raises(ValueError, match="leaves its box"):
        picture.box(10, 10, 60, ["a line that is too long"])


def test_the_tables_of_plans_are_those_of_the_planner() -> None:
    page = (DOCS / "how-to" / "choose-a-plan.md").read_text(encoding="utf-8")
    tables = script("plan_table")
    assert f"<!-- plan table -->\n\n{tables.plan_table()}\n" in page, "run python docs/plan_table.py"
    assert f"<!-- sending table -->\n\n{tables.sending_table()}\n" in page, "run python docs/plan_table.py"


def test_the_table_of_gradients_is_made_from_the_strategies() -> None:
    page = (DOCS / "concepts" / "gradient-scale.md").read_text(encoding="utf-8")
    assert f"<!-- gradient table -->\n\n{script('gradient_table').table()}\n" in page, (
        "run python docs/gradient_table.py"
    )


def test_commands_within_sentences_and_tables_exist() -> None:
    flags = {
        name: {flag for action in parser_for(name)._actions for flag in action.option_strings} for name in commands()
    }
    wrong = []
    for page in sorted(DOCS.rglob("*.md")):
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`paceline ([a-z][^`\n]*)`", prose):
            words = command.split()
            name = " ".join(words[:2]) if " ".join(words[:2]) in flags else words[0]
            # What stands after the script is the script's.
            own = words[: next((at for at, word in enumerate(words) if word.endswith(".py")), None)]
            given = {word.partition("=")[0] for word in own if word.startswith("--")}
            if name not in {*flags, "checkpoint"} or not given <= flags.get(name, given):
                wrong.append(f"{page.relative_to(DOCS)}: paceline {command}")
    assert not wrong
