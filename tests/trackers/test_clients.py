"""Trackers over the real clients, offline: what a run that fails and goes on leaves in each client's own files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("client_program.py")
# Steps 3 and 4 come twice, as after a resume from step 3. Some clients keep one of two that are alike, some both.
STEPS = set(range(8))


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module}: `make trackers` installs it")


def python(folder: Path, words: list[str], *, answer: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """A program in a home of its own, where nobody is logged in."""
    names = ("WANDB", "COMET", "CLEARML", "SWANLAB", "MLFLOW", "TRACKIO", "HF_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    env |= {"HOME": str(folder / "home"), "CLEARML_OFFLINE_MODE": "1", "WANDB_SILENT": "true", **variables}
    (folder / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, input=answer, capture_output=True, text=True, timeout=120
    )


def two_lives(name: str, folder: Path) -> dict[str, Any]:
    """Runs both lives; what they say of themselves."""
    said = []
    for life in ("first", "again"):
        done = python(folder, [str(PROGRAM), name, str(folder / "runs"), life])
        assert done.returncode == 0, done.stderr
        # Clients print too, some at the interpreter's end.
        said += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]
    assert said[0] == said[1]  # the same run
    return said[0]


def log_records(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, after a header of 7 bytes: what W&B and SwanLab keep offline."""
    data = path.read_bytes()
    record = b""
    offset = 7
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # what is left of a block is too short for a record
            offset += 32768 - offset % 32768
            continue
        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def check(points: dict[str, list[tuple[int, float]]]) -> None:
    """What each client has: values by step."""
    assert {step for step, _ in points["loss"]} == STEPS
    assert all(value == pytest.approx(1 / (step + 1)) for step, value in points["loss"])
    assert dict(points["train/accuracy"])[7] == pytest.approx(0.7)


@needs("wandb")
def test_wandb(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    said = two_lives("wandb", tmp_path)
    assert said["native"] == "Run"
    points: dict[str, list[tuple[int, float]]] = {}
    exits, files, config = [], [], {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        assert path.name == f"run-{said['id']}.wandb"
        for text in log_records(path):
            record = Record.FromString(text)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for key, value in row.items():
                    points.setdefault(key, []).append((int(row["_step"]), value))
            elif kind == "exit":
                exits.append(record.exit.exit_code)
            elif kind == "config":
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            elif kind == "files":
                files += [file.path for file in record.files.files]
    check(points)
    assert exits == [1, 0]
    assert points["many/299"] == [(9, 299)]
    assert math.isnan(float(points["odd"][0][1])) and float(points["high"][0][1]) == math.inf
    assert float(points["low"][0][1]) == -math.inf
    assert config["lr"] == 0.1 and config["model"] == {"depth": 3}
    assert points["picture/count"] == [(10, 1)]
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/picture*.png"))


@needs("swanlab")
def test_swanlab(tmp_path: Path) -> None:
    said = two_lives("swanlab", tmp_path)
    first, second = sorted(tmp_path.glob("swanlog/run-*"))
    content = b"".join(record for path in (first, second) for record in log_records(next(path.glob("*.swanlab"))))
    assert all(next(path.glob("*.swanlab")).name == f"run-{said['id']}.swanlab" for path in (first, second))
    assert b"train/accuracy" in content and b"many/299" in content and b"the run ended by an error" in content
    for name, value in (("odd", math.nan), ("high", math.inf), ("low", -math.inf)):
        # A scalar at step 5: its name, and at the end of the record its value.
        named = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x10\x05"
        assert re.search(re.escape(named) + b".{,40}" + re.escape(struct.pack("<d", value)), content, re.DOTALL)
    assert "lr" in (first / "files" / "config.yaml").read_text()
    assert list(second.glob("media/image/*.png"))


@needs("trackio")
def test_trackio(tmp_path: Path) -> None:
    said = two_lives("trackio", tmp_path)
    (path,) = (tmp_path / "home" / ".cache" / "huggingface" / "trackio").glob("*.db")
    points: dict[str, list[tuple[int, float]]] = {}
    with sqlite3.connect(path) as database:
        assert database.execute("select distinct run_name from metrics").fetchall() == [(said["id"],)]
        for step, text in database.execute("select step, metrics from metrics order by id"):
            for key, value in json.loads(text).items():
                points.setdefault(key, []).append((step, value))
        (config,) = database.execute("select config from configs").fetchone()
    database.close()
    check(points)
    assert points["many/299"] == [(9, 299)]
    assert points["odd"] == [(5, "NaN")]
    assert points["high"] == [(5, "Infinity")] and points["low"] == [(5, "-Infinity")]
    assert json.loads(config)["lr"] == 0.1


@needs("comet_ml")
def test_comet(tmp_path: Path) -> None:
    said = two_lives("comet_ml", tmp_path)
    points: dict[str, list[tuple[int, float]]] = {}
    parameters: dict[str, str] = {}
    for path in tmp_path.glob(".cometml-runs/*.zip"):
        assert path.name.startswith(said["id"])
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").decode().splitlines()
        for line in lines:
            payload = json.loads(line)["payload"]
            if "metric" in payload:
                metric = payload["metric"]
                points.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            elif "param" in payload:
                parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif "params" in payload:
                parameters |= {param["paramName"]: param["paramValue"] for param in payload["params"] or []}
    check(points)
    assert points["many/299"] == [(9, 299)]
    assert math.isnan(float(points["odd"][0][1])) and float(points["high"][0][1]) == math.inf
    assert float(points["low"][0][1]) == -math.inf
    assert parameters["lr"] in (0.1, "0.1")


@needs("clearml")
def test_clearml(tmp_path: Path) -> None:
    said = two_lives("clearml", tmp_path)
    (path,) = (tmp_path / "home").rglob("offline-*.zip")
    assert said["id"] == path.stem
    points: dict[str, list[tuple[int, float]]] = {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("metrics.jsonl").decode().splitlines():
            for event in json.loads(line):
                if event["type"] == "training_stats_scalar" and not event["metric"].startswith(":"):
                    points.setdefault(event["metric"], []).append((event["iter"], event["value"]))
        names = archive.namelist()
        task = json.loads(archive.read("task.json"))
    check(points)
    assert points["many/299"] == [(9, 299)]
    assert points.keys().isdisjoint({"odd", "high", "low"})  # they would have been 0
    assert any("picture" in name for name in names)
    assert "lr = 0.1" in task["configuration"]["General"]["value"]


@needs("aim")
def test_aim(tmp_path: Path) -> None:
    said = two_lives("aim", tmp_path)
    read = """if True:
        import json, sys
        from aim import Run
        run = Run(sys.argv[2], repo=sys.argv[1], system_tracking_interval=None, capture_terminal_logs=False)
        points = {}
        for metric in run.metrics():
            steps, columns = metric.data.numpy()
            points[metric.name] = [(int(step), float(value)) for step, value in zip(steps, columns[0])]
        print(json.dumps([points, run["hparams"], run.name]))
    """
    done = python(tmp_path, ["-c", read, str(tmp_path / "runs"), said["id"]])
    assert done.returncode == 0, done.stderr
    points, config, name = json.loads(done.stdout.splitlines()[-1])
    check(points)
    assert points["many/299"] == [[9, 299.0]]
    assert math.isnan(points["odd"][0][1])
    assert (points["high"][0][1], points["low"][0][1]) == (math.inf, -math.inf)
    assert config == {"lr": 0.1, "model": {"depth": 3}, "optimizer": "sgd"} and name == "digits"


@needs("dvclive")
def test_dvclive(tmp_path: Path) -> None:
    done = python(tmp_path, [str(PROGRAM), "dvclive", str(tmp_path / "runs"), "first"])
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in (tmp_path / "dvclive/plots/metrics/loss.tsv").read_text().splitlines()[1:]]
    assert [(int(step), float(value)) for step, value in rows] == [(step, 1 / (step + 1)) for step in range(5)]
    assert "lr: 0.1" in (tmp_path / "dvclive/params.yaml").read_text()


ONLINE = "from paceline.observe.trackers.group import Trackers; Trackers([{name!r}], 'runs').start('digits')"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in ("wandb", "comet_ml", "swanlab", "clearml")]
)
def test_nobody_is_logged_in(name: str, tmp_path: Path) -> None:
    """One of several processes, at a terminal: no question is asked there, and the error says what to do."""
    import pexpect

    env = {**os.environ, "HOME": str(tmp_path), "WORLD_SIZE": "2", "RANK": "0"}
    child = pexpect.spawn(
        sys.executable, ["-c", ONLINE.format(name=name)], cwd=tmp_path, env=env, timeout=60, encoding="utf-8"
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1
    assert f"the tracker '{name}' cannot begin its run 'digits'" in child.before and "[tracker-start]" in child.before
    assert "fix: " in child.before
