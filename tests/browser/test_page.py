"""The page of a run in a real browser: Chromium of the system, driven by playwright, one for this file.

`python tests/browser/test_page.py FOLDER` makes the pictures of the documentation.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_journal import write_synthetic

from paceline_lens.watch.following import FollowedRun
from paceline_lens.watch.frozen import freeze_run, write_frozen
from paceline_lens.watch.server import PageServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

WAIT_MS = 20_000
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 740}


class Shown:
    """What a server shows; tests change it."""

    def __init__(self, snapshot: dict[str, Any], series: dict[str, Any]) -> None:
        self.snapshot = snapshot
        self.series = series
        self.stacks = 0

    def __call__(self, names: list[str] | None) -> dict[str, Any]:
        asked = list(self.series)[:24] if names is None else names
        return {**self.snapshot, "series": {name: self.series[name] for name in asked if name in self.series}}

    def change(self, **parts: Any) -> None:
        self.snapshot = {**self.snapshot, **parts}

    def write_stacks(self) -> None:
        self.stacks += 1


class Watched:
    """A page of the browser, and what it should never have: errors, and requests to anywhere else."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("#state:not(:empty)")
        return self.page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of four ranks, of which rank 3 waits for its data."""
    return write_synthetic(tmp_path_factory.mktemp("run") / "watch", names=12, nan_at=20, restart_at=30)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, Any]:
    run = FollowedRun(folder)
    return run.snapshot(run.snapshot([])["names"])


@pytest.fixture
def shown(recorded: dict[str, Any]) -> Shown:
    """The recorded run as one that still goes on."""
    return Shown({**recorded, "state": "running", "exit_code": None}, recorded["series"])


@pytest.fixture
def server(shown: Shown) -> Iterator[PageServer]:
    with PageServer(shown, interval_s=0.05, write_stacks=shown.write_stacks) as server:
        yield server


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    yield Watched(context.new_page())
    context.close()


@pytest.fixture
def page(watched: Watched, server: PageServer) -> Iterator[Any]:
    """The page, open; at the end it has had no error, and has asked nobody else."""
    yield watched.open(server.url)
    assert watched.errors == []
    assert [url for url in watched.requests if not url.startswith((server.url, "data:"))] == []


def text_of(page: Any, selector: str) -> str:
    return page.inner_text(selector)


def becomes(page: Any, check: Callable[[], bool]) -> None:
    """Waits for something that the page does soon; its events are taken in meanwhile."""
    until = time.monotonic() + WAIT_MS / 1000
    while not check():
        assert time.monotonic() < until
        page.wait_for_timeout(20)


def test_the_page_says_what_the_run_does(page: Any, recorded: dict[str, Any]) -> None:
    assert text_of(page, "h1") == "synthetic" and text_of(page, "#state") == "running"
    assert "Step 240 of 240" in text_of(page, "#progress")
    numbers = text_of(page, "#numbers")
    for name in ("Loss", "Tokens a second", "Model FLOPs utilisation", "Gradient norm", "Loss scale", "Skipped steps"):
        assert name in numbers
    assert recorded["findings"][0]["text"].split("`")[0] in text_of(page, "#findings")
    # The slow loader stands out in the heat map, and nothing else does.
    warm = page.eval_on_selector_all("td.warm", "cells => cells.map(cell => cell.title)")
    assert len(warm) == 1 and warm[0].startswith("rank 3, data: 41 %")
    assert "1.4 GiB" in text_of(page, "#checkpoints") and "node2 does not answer" in text_of(page, "#hosts")
    assert "all processes that no other axis takes" in text_of(page, "#plan")
    assert page.locator("#memory .memory-row").count() == 4
    assert page.locator("#value-charts canvas").count() == 6


def test_memory_of_a_process_is_compared_with_what_it_needs(page: Any, shown: Shown) -> None:
    gib = 1 << 30
    ranks = [{**rank, "memory_peak": 3 * gib, "memory_bytes": None} for rank in shown.snapshot["ranks"]]
    memory = {
        "peak": 3 * gib,
        "peak_rank": 0,
        "forecast": gib,
        "has_activations": False,
        "base": gib // 2,
        "device": None,
    }
    shown.change(ranks=ranks, memory=memory)
    becomes(
        page, lambda: "needed without activations: 1.0 GiB and 512 MiB that the process had" in text_of(page, "#memory")
    )
    # Activations are in every run: being above is nothing to be marked, nor a number to compare.
    assert page.locator("#memory .warm").count() == 0
    assert "forecast" not in text_of(page, "#numbers").partition("Largest memory")[2].partition("Gradient norm")[0]
    assert "Largest memory" not in text_of(page, "#plan")
    shown.change(memory={**memory, "has_activations": True})
    becomes(page, lambda: "the plan's forecast, 1.0 GiB and 512 MiB that the process had" in text_of(page, "#memory"))
    assert page.locator("#memory .warm").count() == 4
    assert "forecast 1.5 GiB" in text_of(page, "#numbers") and "Largest memory" in text_of(page, "#plan")


def test_light_and_dark_are_readable(page: Any) -> None:
    light = contrasts(page)
    page.emulate_media(color_scheme="dark")
    dark = contrasts(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
    for found in (light, dark):
        assert len(found) > 20
        assert min(found.values()) >= 4.5, {text: ratio for text, ratio in found.items() if ratio < 4.5}


def contrasts(page: Any) -> dict[str, float]:
    """Contrast of each text with what is behind it, as WCAG counts it."""
    return page.evaluate(
        """() => {
      const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
      const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = (node) => {
        const layers = [];
        for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
        let under = [255, 255, 255];
        for (const [r, g, b, a] of layers.reverse()) under = [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
        return under;
      };
      const found = {};
      for (const node of document.querySelectorAll("body *:not(.skip):not(.unseen)")) {
        const text = [...node.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
        if (!text || !node.checkVisibility() || node.disabled) continue;
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
        found[`${node.tagName} ${text}`] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      }
      return found;
    }"""
    )


def test_a_phone_needs_no_sideways_scrolling(page: Any) -> None:
    page.set_viewport_size(PHONE)
    becomes(page, lambda: page.evaluate("document.querySelector('canvas').clientWidth < 375"))
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = """() => [...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll') && node.checkVisibility()
        && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []
    assert (
        min(page.eval_on_selector_all("main *", "nodes => nodes.map(n => parseFloat(getComputedStyle(n).fontSize))"))
        >= 12
    )


def test_no_head_of_the_heat_map_is_cut(page: Any, shown: Shown) -> None:
    heat = shown.snapshot["heat"]
    phases = len(heat["phases"])
    shown.change(heat={**heat, "share": [[1 / phases] * phases for _ in heat["ranks"]]})  # all columns are shown
    becomes(page, lambda: page.locator(".heat thead th").count() == phases + 1)
    for width in (1280, 905, 561, 320):
        page.set_viewport_size({"width": width, "height": 900})
        cut = """heads => heads.filter((head) => head.scrollWidth > head.clientWidth || head.scrollHeight > head.clientHeight)
            .map((head) => head.textContent)"""
        assert page.eval_on_selector_all(".heat thead th", cut) == []


def test_a_keyboard_reaches_everything(page: Any) -> None:
    focused = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
    order = []
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
    assert order[:3] == ["skip", "stacks", "search"]
    assert order[3:] == ["BUTTON", "plot"]  # of the first chart: remove it, read it
    page.keyboard.press("Home")
    assert "step 4" in text_of(page, ".chart .readout")
    page.keyboard.press("ArrowRight")
    assert "step 8" in text_of(page, ".chart .readout")
    page.focus("#search")
    page.keyboard.type("value 11")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#search", "aria-activedescendant") == "option-0"
    page.keyboard.press("Enter")
    becomes(page, lambda: "value 11" in text_of(page, "#value-charts"))
    assert page.get_attribute("#option-0", "aria-selected") == "true"
    page.keyboard.press("Escape")
    assert page.is_hidden("#options") and page.get_attribute("#search", "aria-expanded") == "false"
    # The choice is in the address, and so outlives loading the page again.
    page.reload()
    page.wait_for_selector("#value-charts canvas")
    assert "value 11" in text_of(page, "#value-charts .chart >> nth=0")


def test_every_control_has_a_name(page: Any) -> None:
    nameless = """() => [...document.querySelectorAll('button, input, [role=img], [role=progressbar], section, table')]
      .filter((node) => node.checkVisibility() && !(node.getAttribute('aria-label') || node.getAttribute('aria-labelledby')
        || node.textContent.trim())).map((node) => node.outerHTML.slice(0, 80))"""
    assert page.evaluate(nameless) == []
    label = page.get_attribute("#value-charts .plot", "aria-label")
    assert label.startswith("loss: now") and "lowest" in label
    assert page.evaluate("document.documentElement.lang") == "en"


def test_news_arrive_and_disturb_nobody(page: Any, shown: Shown) -> None:
    page.click("#plan summary")
    page.focus("#search")
    progress = {**shown.snapshot["progress"], "step": 200, "percent": 83.33}
    shown.change(progress=progress, latest={**shown.snapshot["latest"], "loss": "nan"})
    becomes(page, lambda: "Step 200 of 240" in text_of(page, "#progress"))
    assert "NaN" in text_of(page, "#numbers") and page.title().startswith("83 %")
    assert page.evaluate("document.querySelector('#plan details').open")
    assert page.evaluate("document.activeElement.id") == "search"
    shown.series = {**shown.series, "loss": {**shown.series["loss"], "points": [[1, 5.0], [2, "inf"], [3, "-inf"]]}}
    becomes(page, lambda: "infinity first at step 2" in text_of(page, "#value-charts"))
    assert "−infinity" in text_of(page, ".chart .readout")


def test_a_wrong_token_shows_nothing(watched: Watched, server: PageServer) -> None:
    wrong = server.url.replace(server.token, server.token[:-1])
    answer = watched.page.request.get(wrong)
    assert answer.status == 403 and answer.body() == b"" and "server" not in answer.headers
    # Chromium shows a page of its own where an answer is empty.
    with pytest.raises(playwright.Error, match="RESPONSE_CODE"):
        watched.page.goto(wrong)


def test_names_and_texts_of_scripts_are_only_text(page: Any, shown: Shown, watched: Watched, tmp_path: Path) -> None:
    series = {name: shown.series["loss"] for name in (HOSTILE, "__proto__", "constructor", "</script><script>alert(1)")}
    ranks = [{**rank, "host": HOSTILE, "device": HOSTILE, "at": HOSTILE} for rank in shown.snapshot["ranks"]]
    finding = {**shown.snapshot["findings"][0], "text": HOSTILE, "level": "warning"}
    error = {"t": 1.8e9, "rank": 0, "host": HOSTILE, "code": HOSTILE, "text": "</pre></script>" + HOSTILE}
    plan = {**shown.snapshot["plan"], "text": HOSTILE, "reasons": [[HOSTILE] * 4]}
    shown.series = series
    shown.change(
        name=HOSTILE, names=list(series), ranks=ranks, findings=[finding], errors=[error], plan=plan, why=HOSTILE
    )
    becomes(page, lambda: HOSTILE in text_of(page, "#value-charts"))
    for name in ("__proto__", "constructor"):
        assert page.locator(f"#value-charts .name[title='{name}']").count() == 1
    frozen = write_frozen(shown(list(series)), tmp_path / "hostile.html")
    other = watched.page.context.new_page()
    for shows in (page, Watched(other).open(frozen.as_uri())):
        assert HOSTILE in text_of(shows, "#reports") and text_of(shows, "h1") == HOSTILE
        assert shows.locator("img").count() == 0
        assert "owned" not in shows.evaluate("document.title").split(" · ")[0]
    other.close()


def test_ten_thousand_names(page: Any, shown: Shown) -> None:
    names = [f"layer/{number}/weight" for number in range(10_000)]
    shown.series = {name: {**shown.series["loss"], "last": 1.0} for name in names}
    shown.change(names=names)
    becomes(page, lambda: "9,994 more" in text_of(page, "#values"))
    began = time.monotonic()
    page.fill("#search", "9876 weight")
    becomes(page, lambda: text_of(page, "#options") == "layer/9876/weight")
    page.click("#options li")
    becomes(page, lambda: page.locator("#value-charts .name[title='layer/9876/weight']").count() == 1)
    assert time.monotonic() - began < 5
    assert page.evaluate("document.querySelectorAll('*').length") < 2500


def test_the_page_comes_back_with_the_server(watched: Watched, shown: Shown) -> None:
    with PageServer(shown, interval_s=0.05) as first:
        page = watched.open(first.url)
        token, port = first.token, first.port
    becomes(page, lambda: "No connection" in text_of(page, "#connection"))
    assert "Step 240 of 240" in text_of(page, "#progress")
    shown.change(progress={**shown.snapshot["progress"], "step": 77})
    with PageServer(shown, interval_s=0.05, port=port, token=token):
        becomes(page, lambda: "Step 77 of 240" in text_of(page, "#progress"))
        assert text_of(page, "#connection").startswith("Live")


def test_a_page_in_the_background_leaves_its_connection(page: Any, server: PageServer) -> None:
    hide = "isHidden => { Object.defineProperty(document, 'hidden', {value: isHidden, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    becomes(page, lambda: server.publication.pages == 1)
    page.evaluate(hide, True)
    becomes(page, lambda: server.publication.pages == 0)
    page.evaluate(hide, False)
    becomes(page, lambda: server.publication.pages == 1)


# Takes the place of the browser's stream of events, so that a test sends thousands of them at once.
STREAM = """
  window.EventSource = class extends EventTarget {
    constructor() { super(); window.stream = this; setTimeout(() => this.dispatchEvent(new Event('open'))); }
    close() {}
  };
"""
# Each update is taken; every 40th is drawn, with the next points of a curve that is as long as curves become.
UPDATES = """async ([times, first]) => {
  for (let step = first; step < first + times; step += 1) {
    const parts = [[['now'], 1.8e9 + step], [['progress', 'step'], step]];
    if (step % 40 === 0) {
      const points = Array.from({ length: 2000 }, (_, index) => [step + index, Math.sin(step + index)]);
      parts.push([['series', 'loss'], { points, by: 'step', last: 1, last_step: step, count: step }]);
    }
    window.stream.dispatchEvent(new MessageEvent('change', { data: JSON.stringify(parts) }));
    if (step % 40 === 0) await new Promise(requestAnimationFrame);
  }
}"""


def test_a_page_left_open_for_days_does_not_grow(watched: Watched, server: PageServer, shown: Shown) -> None:
    page = watched.page
    page.add_init_script(STREAM)
    page.goto(server.url)
    parts = [[[name], value] for name, value in shown(None).items()]
    page.evaluate("data => window.stream.dispatchEvent(new MessageEvent('snapshot', {data}))", json.dumps(parts))
    session = page.context.new_cdp_session(page)

    def weigh() -> tuple[float, int, int]:
        session.send("HeapProfiler.collectGarbage")
        counts = session.send("Memory.getDOMCounters")
        heap = session.send("Runtime.getHeapUsage")["usedSize"]
        return heap, counts["nodes"], counts["jsEventListeners"]

    # The browser compiles code during the first updates, and the first question about a text brings the driver's own script.
    page.evaluate(UPDATES, [2000, 1])
    becomes(page, lambda: "Step 2,000" in text_of(page, "#progress"))
    heap, nodes, listeners = weigh()
    for first in (2001, 4001):
        page.evaluate(UPDATES, [2000, first])
    becomes(page, lambda: "Step 6,000" in text_of(page, "#progress"))
    heap_later, nodes_later, listeners_later = weigh()
    # What one update or one drawing leaves behind would be there thousands or hundreds of times.
    assert nodes_later < nodes + 50 and listeners_later < listeners + 50
    assert heap_later < heap + 0.3e6
    assert watched.errors == []


def test_the_button_asks_for_stacks(page: Any, shown: Shown) -> None:
    page.click("#stacks")
    becomes(page, lambda: shown.stacks == 1)
    becomes(page, lambda: "Asked for" in text_of(page, "#stacks"))
    report = {"t": 1.8e9, "text": "3 ranks in all_reduce at train.py:88", "file": "stuck.txt", "ranks": [3]}
    shown.change(stuck=[report])
    becomes(page, lambda: "3 ranks in all_reduce" in text_of(page, "#reports"))
    shown.change(state="ended", exit_code=1, why="rank 3 failed")
    becomes(page, lambda: page.is_hidden("#stacks"))
    assert text_of(page, "#state") == "failed, exit code 1" and "rank 3 failed" in text_of(page, "#findings")


def test_a_run_that_has_just_begun(page: Any, shown: Shown, tmp_path: Path) -> None:
    begun = FollowedRun(write_synthetic(tmp_path / "watch", seconds=0, exit_code=None, names=0)).snapshot()
    shown.series = {}
    shown.change(**{**begun, "state": "starting"})
    becomes(page, lambda: text_of(page, "#state") == "starting")
    assert "Nothing has been logged yet" in text_of(page, "#values") and "No step has ended" in text_of(page, "#phases")


def test_eight_hundred_ranks(page: Any, shown: Shown) -> None:
    one = shown.snapshot["ranks"][0]
    share = [list(shown.snapshot["heat"]["share"][0]) for _ in range(800)]
    share[431] = shown.snapshot["heat"]["share"][3]
    heat = {**shown.snapshot["heat"], "ranks": list(range(800)), "share": share, "ms_per_step": [None] * 800}
    shown.change(heat=heat, ranks=[{**one, "rank": rank} for rank in range(800)])
    becomes(page, lambda: page.locator("table.heat.dense tbody tr").count() == 800)
    assert page.eval_on_selector_all("td.warm", "cells => cells.map(cell => cell.title)")[0].startswith(
        "rank 431, data"
    )
    assert page.evaluate("document.querySelector('#phases').offsetHeight") < 900


def test_a_frozen_page_opens_from_the_disk(watched: Watched, folder: Path) -> None:
    path = freeze_run(folder.parent)
    assert path == folder.parent / "report.html"
    page = watched.open(path.as_uri())
    assert text_of(page, "#state") == "ended" and text_of(page, "#connection").startswith("As it was at")
    assert page.is_hidden("#stacks")
    page.fill("#search", "value 11")
    page.click("#options li")
    becomes(page, lambda: "value 11" in text_of(page, "#value-charts"))
    assert watched.errors == [] and watched.requests == [path.as_uri()]


# -- pictures of the documentation -------------------------------------------------------------------------------------


def run_of_the_pictures(folder: Path) -> Shown:
    """A synthetic run of eight ranks in the middle of its way, with curves as they usually look."""
    written = write_synthetic(
        folder / "watch", ranks=8, seconds=600, names=2, restart_at=200, started=time.time() - 600
    )
    snapshot = FollowedRun(written).snapshot()
    draw = random.Random(0)
    curves: dict[str, Callable[[int], float]] = {
        "train/loss": lambda step: 1.9 + 9 * math.exp(-step / 350) + draw.gauss(0, 0.04),
        "eval/loss": lambda step: 2.0 + 9 * math.exp(-step / 340),
        "learning_rate": lambda step: 3e-4 * min(1, step / 300) * (0.5 + 0.5 * math.cos(math.pi * step / 10_000)),
        "grad_norm": lambda step: 0.8 + 2.5 * math.exp(-step / 250) + abs(draw.gauss(0, 0.12)),
        "eval/accuracy": lambda step: 0.62 * (1 - math.exp(-step / 900)),
        "tokens_seen": lambda step: 65_536.0 * step,
    }
    series = {}
    for name, curve in curves.items():
        every = 100 if name.startswith("eval") else 4
        points = [[step, curve(step)] for step in range(every, 2401, every)]
        series[name] = {"points": points, "by": "step", "last": points[-1][1], "last_step": 2400, "count": len(points)}
    speed = [[second, 262_000 + draw.gauss(0, 2500) - 30_000 * (198 < second < 206)] for second in range(5, 600, 3)]
    forecast = {**snapshot["speed"]["forecast"], "step_ms": 230.0}
    history = {
        "tokens_per_s": speed,
        "step_ms": [[second, 65_536_000 / tokens] for second, tokens in speed],
        "mfu": [[second, 0.485 * tokens / 262_000] for second, tokens in speed],
    }
    changed = {
        "name": "train-gpt", "command": ["paceline", "launch", "--watch", "train_gpt.py"], "names": list(series),
        "state": "running", "exit_code": None, "why": "", "history": history, "page": {"stacks": True},
        "progress": {**snapshot["progress"], "step": 2400, "total": 10_000, "percent": 24.0, "seconds_left": 1900.0},
        "latest": {**snapshot["latest"], "loss": series["train/loss"]["last"], "grad_norm": series["grad_norm"]["last"]},
        "speed": {**snapshot["speed"], "forecast": forecast},
    }  # fmt: skip
    return Shown({**snapshot, **changed}, series)


def make_pictures(folder: Path) -> None:
    """Writes the pictures of the documentation: light, dark, and a phone."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"light": (DESKTOP, "light", 1), "dark": (DESKTOP, "dark", 1), "phone": (PHONE, "light", 2)}
    with tempfile.TemporaryDirectory() as temporary, playwright.sync_playwright() as driver:
        shown = run_of_the_pictures(Path(temporary))
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with PageServer(shown, write_stacks=shown.write_stacks) as server:
            for name, (size, scheme, scale) in kinds.items():
                page = browser.new_page(
                    viewport={**size, "height": 1360 if name != "phone" else 812},
                    color_scheme=scheme,
                    device_scale_factor=scale,
                )
                Watched(page).open(server.url)
                page.wait_for_timeout(800)
                path = folder / f"page-{name}.png"
                page.screenshot(path=path)
                page.close()
                # Flat colours: a palette keeps them, at a third of the bytes.
                Image.open(path).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(path, optimize=True)
        browser.close()


if __name__ == "__main__":
    make_pictures(Path(sys.argv[1]))
