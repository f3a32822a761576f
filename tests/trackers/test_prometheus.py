"""The metrics of a run under the real Prometheus: promtool finds nothing wrong, and what is scraped can be asked for."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_port

from paceline_lens.watch import records
from paceline_lens.watch.journal import JournalWriter, RunHeader, rank_file, write_header

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="Prometheus is not installed: `apt-get install prometheus`",
    ),
]
CONFIG = """
global: {{scrape_interval: 500ms}}
scrape_configs:
  - job_name: paceline
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "watch"
    write_header(folder, RunHeader(name="train", script="train.py", host="node0", started=time.time(), procs=2))
    for rank in range(2):
        writer = JournalWriter(folder / rank_file(rank))
        writer.append(records.Hello(rank, 0, "node0", memory_bytes=2**30))
        writer.append(records.Tick(3, 100, 48, None, "data", ms={"data": 400 * rank, "forward": 500}, steps=3))
        writer.close()
    return folder


@pytest.fixture
def metrics(watched: Path) -> Iterator[str]:
    """Host and port at which the command serves them."""
    command = [sys.executable, "-m", "paceline", "metrics", str(watched.parent), "--port", "0"]
    with started(command, stderr=subprocess.PIPE) as process:
        said = process.stderr.readline()
        yield urllib.parse.urlsplit(said.split()[-1]).netloc
    assert process.returncode in (0, -15)
    process.stderr.close()


@pytest.fixture
def prometheus(metrics: str, tmp_path: Path) -> Iterator[str]:
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(target=metrics))
    checked = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}",
    ]  # fmt: skip
    with (tmp_path / "prometheus.log").open("w") as log, started(command, stderr=log, cwd=tmp_path):
        yield f"http://{address}"


def ask(prometheus: str, query: str) -> dict[str, float]:
    """Values of a query, by one label each."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        results = json.load(answer)["data"]["result"]
    found = {}
    for result in results:
        label = result["metric"].get("rank") or result["metric"].get("name") or ""
        found[label] = float(result["value"][1])
    return found


def until(prometheus: str, query: str, condition) -> dict[str, float]:
    deadline = time.monotonic() + 30
    answer: dict[str, float] = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            answer = ask(prometheus, query)
            if condition(answer):
                return answer
        time.sleep(0.3)
    raise AssertionError(f"{query}: {answer}")


def test_promtool_finds_nothing_wrong(metrics: str) -> None:
    with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
        text = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert checked.returncode == 0 and checked.stderr == b"", checked.stderr


def test_prometheus_scrapes_a_run_that_goes_on(prometheus: str, watched: Path) -> None:
    assert until(prometheus, "up", lambda answer: answer == {"": 1.0})
    until(prometheus, "paceline_step", lambda answer: answer == {"": 3.0})
    data = until(prometheus, 'paceline_phase_seconds_total{phase="data"}', lambda answer: len(answer) == 2)
    assert data == {"0": 0.0, "1": 0.4}
    writer = JournalWriter(watched / rank_file(0))
    writer.append(records.Tick(8, 100, 128, None, "data", ms={"forward": 900}, steps=5))
    writer.append(records.ValuesLogged(8, {"train/loss ü": 0.25, "odd": math.nan, "high": math.inf}))
    writer.append(records.ValuesLogged(8, {f"name {number}": number for number in range(9000)}))
    writer.close()
    until(prometheus, "paceline_samples_total", lambda answer: answer == {"": 128.0})
    assert ask(prometheus, 'paceline_value{name="train/loss ü"}') == {"train/loss ü": 0.25}
    assert math.isnan(ask(prometheus, 'paceline_value{name="odd"}')["odd"])
    assert ask(prometheus, 'paceline_value{name="high"}') == {"high": math.inf}
    assert ask(prometheus, "count(paceline_value)") == {"": 9003.0}
    # How a slow loader shows: the share of its time that a rank waits for data.
    shares = ask(
        prometheus, 'paceline_phase_seconds_total{phase="data"} / ignoring(phase) sum without(phase) '
        "(paceline_phase_seconds_total)",
    )  # fmt: skip
    assert shares["1"] == pytest.approx(0.4 / 0.9)
