"""Each page of the documentation as a picture, in Chromium: a telephone, a laptop, and in the dark.

No page scrolls sideways, no column is cut, no flag is broken at its hyphens, and no part of a page lies over the next one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A page is loaded once for each scheme, and only becomes narrower: where it becomes wider, the theme moves its menu for a
# moment.
LAPTOP = {"width": 1280, "height": 900}
SIZES = {"light": (LAPTOP, {"width": 420, "height": 800}), "dark": (LAPTOP,)}
PROBLEMS = """() => {
  const problems = [];
  const root = document.documentElement;
  const article = document.querySelector("article") || document.body;
  const name = (element) => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`;
  if (root.scrollWidth > root.clientWidth + 1) {
    const wide = [...article.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1);
    problems.push(`scrolls sideways by ${root.scrollWidth - root.clientWidth}: ${wide.slice(0, 3).map(name).join("; ")}`);
  }
  for (const cell of article.querySelectorAll("td, th, pre > code, img, svg")) {
    const right = cell.getBoundingClientRect().right;
    for (let box = cell; box && box !== root; box = box.parentElement) {
      const overflow = getComputedStyle(box).overflowX;
      if (overflow === "auto" || overflow === "scroll") break;
      if (overflow !== "visible" && box !== cell && right > box.getBoundingClientRect().right + 1) {
        problems.push(`cut: ${name(cell)}`);
        break;
      }
    }
  }
  for (const flag of article.querySelectorAll("code .flag")) {
    if (flag.getClientRects().length > 1) problems.push(`broken: ${flag.textContent}`);
  }
  let above = null;
  for (const box of article.children) {
    const style = getComputedStyle(box);
    const area = box.getBoundingClientRect();
    if (style.position !== "static" || style.float !== "none" || !area.height || style.display === "none") continue;
    if (above && area.top < above.getBoundingClientRect().bottom - 1) {
      problems.push(`over each other: ${name(above)} and ${name(box)}`);
    }
    above = box;
  }
  return problems;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def problems_of(browser: Any, folder: Path) -> list[str]:
    """All problems of all pages of a site, each with its page, scheme and width."""
    found = []
    for scheme, sizes in SIZES.items():
        page = browser.new_page(color_scheme=scheme)  # with a storage of its own, in which the theme keeps the scheme
        for file in sorted(folder.rglob("*.html")):
            if file.name == "404.html":
                continue
            page.set_viewport_size(sizes[0])
            page.goto(file.as_uri())
            for size in sizes:
                page.set_viewport_size(size)
                where = f"{file.relative_to(folder).as_posix()}, {scheme}, {size['width']}"
                found += [f"{where}: {problem}" for problem in page.evaluate(PROBLEMS)]
        page.close()
    return found


@pytest.mark.timeout(900)  # 170 pages: a minute on an idle machine
def test_every_page_can_be_read_on_every_screen(browser: Any, site: Path) -> None:
    assert problems_of(browser, site) == []


def test_the_dark_scheme_is_dark(browser: Any, site: Path, tmp_path: Path) -> None:
    pictures = []
    for scheme in SIZES:
        page = browser.new_page(color_scheme=scheme, viewport=LAPTOP)
        page.goto((site / "index.html").as_uri())
        page.wait_for_function("document.body.dataset.mdColorMedia")
        pictures.append(page.screenshot(path=str(tmp_path / f"{scheme}.png")))
        page.close()
    assert pictures[0] != pictures[1]


def test_each_kind_of_problem_is_seen(browser: Any, tmp_path: Path) -> None:
    """The test above would be green for ever if its script saw nothing."""
    wide = "<div style='width:2000px'>wide</div>"
    cut = "<div style='overflow:hidden;width:100px'><table style='width:900px'><tr><td>cut</td></tr></table></div>"
    broken = "<p style='width:60px'><code><span class='flag'>--mixed-precision-of-it</span></code></p>"
    over = "<p>above</p><p style='margin-top:-2em'>below</p>"
    for kind, body in {"scrolls": wide, "cut": cut, "broken": broken, "over": over}.items():
        (tmp_path / "page.html").write_text(f"<!DOCTYPE html><article>{body}</article>", encoding="utf-8")
        found = problems_of(browser, tmp_path)
        assert len(found) >= 3 and all(kind in problem for problem in found), (kind, found)
