"""The metrics of a run: what Prometheus is told, line by line, and over HTTP."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from paceline.base.errors import LaunchError
from paceline.cli.main import main
from paceline_lens.watch import records
from paceline_lens.watch.journal import JournalReader, JournalWriter, RunHeader, rank_file, write_header
from paceline_lens.watch.metrics import METRICS, MOST_NAMES, MetricsServer, text_of
from paceline_lens.watch.page_process import PageProcess
from paceline_lens.watch.recording import check_metrics_port


def journal(folder: Path, lines: dict[str, list[records.JournalRecord]], **header) -> Path:
    write_header(folder, RunHeader(name="train", script="train.py", host="node0", started=1000.0, procs=2, **header))
    for name, of_file in lines.items():
        writer = JournalWriter(folder / name)
        writer.write([(record, 1001.0 + number) for number, record in enumerate(of_file)])
        writer.close()
    return folder


def values(text: str) -> dict[str, str]:
    """Name with labels -> value."""
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


ALL: dict[str, list[records.JournalRecord]] = {
    "launcher-0.jsonl": [
        records.RoundStarted(0, 2, 1),
        records.RoundStarted(1, 4, 2, restarts=1, why="rank 1 failed", joined=["node1"]),
        records.Stuck("2 ranks wait", "file", [1]),
        records.ErrorShown(1, "node0", "launch-failed", "text"),
        records.LauncherEnded(1, "failed"),
    ],
    rank_file(0): [
        records.Hello(0, 0, "node0", peak_flops=1e12, memory_bytes=2**30),
        records.PlanMade("plan", step_ms=250.0, memory_bytes=1000, flops=3e9),
        records.Tick(
            5, 100, 80, 800, "forward", ms={"data": 100, "forward": 400.5}, steps=5, memory=10, memory_peak=20
        ),
        records.ValuesLogged(5, {"loss": 0.5, "odd": math.nan, "high": math.inf, "low": -math.inf, 'say "hi"\\\n': 1}),
        records.Tick(
            10, 100, 160, 1600, "forward", ms={"data": 100, "forward": 400}, steps=5, memory=11, memory_peak=21
        ),
        records.CheckpointSaved(10, "checkpoint", 4096, 0.25, 1.5),
        records.CheckpointSaved(11, "checkpoint", None, 0.5, None, ok=False, reason="disk full"),
        records.AnomalyFound(10, "nan", action="skip"),
        records.AnomalyFound(11, "nan", action="skip"),
        # The processes were started again from an earlier step.
        records.Hello(0, 0, "node0", restart=1, memory_bytes=2**30),
        records.Tick(8, 100, 128, 1280, "forward", steps=3),
        records.Tick(9, 100, 144, 1440, "forward", steps=1),
    ],
    rank_file(1): [records.Hello(1, 1, "node1"), records.Tick(5, samples=80, ms={"data": 900}, steps=5)],
}


def test_each_line_becomes_numbers(tmp_path: Path) -> None:
    text = text_of(JournalReader(journal(tmp_path, ALL)))
    said = values(text)
    assert said['paceline_run_info{name="train",script="train.py",host="node0"}'] == "1"
    assert (
        said["paceline_processes"] == "4" and said["paceline_nodes"] == "2" and said["paceline_restarts_total"] == "1"
    )
    assert said["paceline_step"] == "9" and said["paceline_step_target"] == "100"
    assert said["paceline_steps_total"] == "14"  # 10, and 4 of the second start; rank 1 does the same ones
    assert said["paceline_samples_total"] == "176"  # 160, and 16 since it began anew at 128
    assert said["paceline_tokens_total"] == "1760"
    assert float(said['paceline_phase_seconds_total{rank="0",phase="forward"}']) == pytest.approx(0.8005)
    assert float(said['paceline_phase_seconds_total{rank="1",phase="data"}']) == pytest.approx(0.9)
    assert said['paceline_memory_peak_bytes{rank="0"}'] == "21"
    assert said['paceline_last_report_time_seconds{rank="1",host="node1"}'] == "1002.0"
    assert said['paceline_value{name="loss"}'] == "0.5" and said['paceline_value{name="odd"}'] == "NaN"
    assert said['paceline_value{name="high"}'] == "+Inf" and said['paceline_value{name="low"}'] == "-Inf"
    assert said[r'paceline_value{name="say \"hi\"\\\n"}'] == "1.0"
    assert (
        said['paceline_checkpoints_total{complete="true"}']
        == said['paceline_checkpoints_total{complete="false"}']
        == "1"
    )
    assert said["paceline_checkpoint_bytes"] == "4096" and said["paceline_checkpoint_stall_seconds_total"] == "0.75"
    assert said['paceline_anomalies_total{what="nan",action="skip"}'] == "2"
    assert said['paceline_errors_total{code="launch-failed"}'] == said["paceline_stuck_total"] == "1"
    assert said["paceline_planned_step_seconds"] == "0.25" and said["paceline_step_flops"] == "3000000000.0"
    assert said['paceline_exit_code{node="0"}'] == "1"
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert told == METRICS.keys() - {"paceline_values_left_out"}


def test_more_names_than_are_shown(tmp_path: Path) -> None:
    many = records.ValuesLogged(1, {f"name {number}": number for number in range(MOST_NAMES + 5)})
    text = text_of(JournalReader(journal(tmp_path, {rank_file(0): [many, many]})))
    assert text.count("paceline_value{") == MOST_NAMES
    assert values(text)["paceline_values_left_out"] == "5"


def test_it_is_served_as_the_run_goes_on(tmp_path: Path) -> None:
    folder = journal(tmp_path, {rank_file(0): [records.Tick(1, steps=1)]})
    server = MetricsServer(JournalReader(folder), 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with urllib.request.urlopen(server.url) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert values(answer.read().decode())["paceline_step"] == "1"
        writer = JournalWriter(folder / rank_file(0))
        writer.append(records.Tick(2, steps=1))
        writer.close()
        with urllib.request.urlopen(server.url) as answer:
            assert values(answer.read().decode())["paceline_steps_total"] == "2"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("/metrics", "/"))
        with pytest.raises(LaunchError, match="in use") as caught:
            MetricsServer(JournalReader(folder), int(server.url.split(":")[2].split("/")[0]))
        assert caught.value.code == "metrics-port"
    finally:
        server.close()
        thread.join()


def test_the_launcher_serves_them_in_a_process_beside_it(tmp_path: Path, port: int) -> None:
    folder = journal(tmp_path, ALL)
    check_metrics_port(port)
    beside = PageProcess(folder, port)
    try:
        deadline = time.monotonic() + 20
        text = ""
        while not text and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError):
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            time.sleep(0.05)
        assert values(text)["paceline_steps_total"] == "14"
        with pytest.raises(LaunchError, match="--metrics-port 0") as caught:
            check_metrics_port(port)
        assert caught.value.code == "metrics-port"
    finally:
        beside.end()
    assert beside._process.returncode == 0


def test_the_command_prints_them_or_says_what_is_wrong(tmp_path: Path, capsys) -> None:
    folder = journal(tmp_path / "watch", ALL)
    assert main(["metrics", str(folder), "--once"]) == 0
    assert "paceline_steps_total 14\n" in capsys.readouterr().out
    assert main(["metrics", str(tmp_path / "none"), "--once"]) == 2
    assert "watch-folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["metrics", str(folder), "--port", str(taken.getsockname()[1])]) == 1
    assert "metrics-port" in capsys.readouterr().err
