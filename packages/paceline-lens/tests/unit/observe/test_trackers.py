"""Trackers: what they write, and what they refuse."""

from __future__ import annotations

import csv
import json
import logging
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from paceline.base import log
from paceline.base.errors import TrackerError
from paceline.observe.trackers.group import Trackers
from paceline.observe.trackers.jsonl import JsonlTracker
from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import TRACKERS, BlankTracker, Tracker, flatten


class Recorder:
    """A user's own tracker."""

    name = "recorder"

    def __init__(self, folder=None, **options):
        self.folder, self.options, self.said = folder, options, []

    def start(self, run, config):
        self.said.append(("start", run, config))

    def log(self, values, step=None):
        self.said.append(("log", values, step))

    def finish(self, status="finished"):
        self.said.append(("finish", status))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_trackers_are_found_and_fit_the_protocol(tmp_path):
    assert TRACKERS.names() == [
        "aim", "clearml", "comet_ml", "csv", "dvclive", "jsonl", "mlflow", "swanlab", "tensorboard",
        "trackio", "wandb",
    ]  # fmt: skip
    for name in TRACKERS.names():
        assert TRACKERS.get(name).name == name
    assert isinstance(JsonlTracker(tmp_path), Tracker)


def test_jsonl_writes_one_flushed_line_a_call(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.start("run", {"lr": 0.1, "path": tmp_path})
    values = {"a": 1, "b": 0.5, "c": "text", "d": torch.tensor(2.0), "e": np.float32(3), "f": {"g": [1, 2]}, "h": True}
    tracker.log(values, step=7)
    start, said = lines(tmp_path / "run" / "metrics.jsonl")  # before it is closed
    assert start["run"] == "run" and start["config"] == {"lr": 0.1, "path": str(tmp_path)}
    assert said["step"] == 7
    assert said["values"] == {"a": 1, "b": 0.5, "c": "text", "d": 2.0, "e": 3.0, "f": {"g": [1, 2]}, "h": True}
    tracker.finish("failed")
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["status"] == "failed"


def test_jsonl_writes_nan_as_null_and_warns_once(tmp_path, caplog):
    log.forget_warnings()
    tracker = JsonlTracker(tmp_path)
    tracker.start("run", {})
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(3):
            tracker.log({"loss": torch.tensor(math.nan)})
    tracker.finish()
    assert [line["values"]["loss"] for line in lines(tracker.path)[1:4]] == [None] * 3
    assert len(caplog.records) == 1 and "loss is nan" in caplog.text


def test_jsonl_appends_to_a_run_that_is_there(tmp_path):
    for _ in range(2):
        tracker = JsonlTracker(tmp_path)
        tracker.start("run", {})
        tracker.finish()
    assert [line["event"] for line in lines(tracker.path)] == ["start", "finish"] * 2


def test_csv_has_a_row_for_each_value_and_goes_on(tmp_path):
    for start in (0, 2):
        tracker = TRACKERS.get("csv")(tmp_path)
        tracker.start("run", {"lr": 0.1, "path": tmp_path})
        for step in range(start, start + 2):
            tracker.log({"loss": torch.tensor(step / 2), "train": {"a,b": step}, "note": 'say "hi"\nthere'}, step)
        tracker.finish()
    tracker.start("run", {})
    tracker.log({"odd": math.nan, "high": math.inf})
    tracker.log({f"layer {number}": number for number in range(10_000)}, 4)
    tracker.finish("failed")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["value"]) for row in rows if row["name"] == "loss"] == [
        ("0", "0.0"), ("1", "0.5"), ("2", "1.0"), ("3", "1.5"),
    ]  # fmt: skip
    assert [row["value"] for row in rows if row["name"] == "train/a,b"] == ["0", "1", "2", "3"]
    assert rows[2]["value"] == 'say "hi"\nthere'
    odd, high = rows[12:14]
    assert math.isnan(float(odd["value"])) and float(high["value"]) == math.inf and odd["step"] == ""
    assert len(rows) == 14 + 10_000
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1, "path": str(tmp_path)}


def test_a_library_that_cannot_begin_says_why_and_what_to_do(tmp_path, monkeypatch):
    class Closed(LibraryTracker):
        name, requires, package = "closed", (), "closed-client"
        without_server = "log in by `closed login`"
        store_config = log = close_run = None

        def open_run(self, run):
            raise OSError(f"no key;\n stdin is {sys.stdin.name}")

    Closed.__abstractmethods__ = frozenset()
    terminal = sys.stdin
    monkeypatch.setenv("WORLD_SIZE", "2")  # nobody can answer a question there
    trackers = Trackers(Closed, tmp_path)
    with pytest.raises(TrackerError, match=r"no key; stdin is /dev/null\n  fix: log in by `closed login`") as caught:
        trackers.start("run")
    assert caught.value.code == "tracker-start" and sys.stdin is terminal
    closed = Closed(tmp_path)
    closed.resume("r1")
    with pytest.raises(TrackerError, match="go on with its run r1"):
        closed.start("run", {})


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
def test_a_value_that_cannot_be_written_is_named(tmp_path, name):
    tracker = TRACKERS.get(name)(tmp_path)
    tracker.start("run", {})
    with pytest.raises(TrackerError, match=r"cannot write weights, a Tensor") as caught:
        tracker.log({"weights": torch.zeros(2, 3)})
    tracker.finish()
    assert caught.value.code == "tracker-value"
    assert name == "csv" or "shape (2, 3)" in str(caught.value)


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
def test_logging_before_start_says_what_to_call(tmp_path, name):
    with pytest.raises(TrackerError, match="init_trackers") as caught:
        TRACKERS.get(name)(tmp_path).log({"loss": 1.0})
    assert caught.value.code == "tracker-closed"


def test_tensorboard_writes_scalars_text_groups_and_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TRACKERS.get("tensorboard")(tmp_path)
    tracker.start("run", {"lr": 0.1, "model": {"depth": 3}, "none": None})
    tracker.log({"loss": 0.5, "note": "hello", "heads": {"a": 1, "b": torch.tensor(2.0)}}, step=3)
    tracker.log({"loss": math.nan, "odd": math.inf, "low": -math.inf}, step=4)
    assert tracker.native.log_dir == str(tmp_path / "run")
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    values = {name: [event.value for event in events.Scalars(name)] for name in ("loss", "odd", "low")}
    assert values["loss"][0] == 0.5 and math.isnan(values["loss"][1])
    assert values["odd"] == [math.inf] and values["low"] == [-math.inf]
    assert {"note/text_summary", "status/text_summary"} <= set(events.Tags()["tensors"])
    assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == {"heads_a", "heads_b"}
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert b"model/depth" in events.summary_metadata["_hparams_/session_start_info"].plugin_data.content


def test_the_group_starts_logs_and_finishes_each(tmp_path):
    mine = Recorder()
    trackers = Trackers(["jsonl", mine], tmp_path)
    assert trackers.names == ["jsonl", "recorder"]
    trackers.start("run", {"lr": 1})
    trackers.log({"loss": torch.tensor(0.25)}, step=1)
    assert trackers.get_tracker("recorder") is mine
    assert trackers.get_tracker("jsonl", unwrap=True).name.endswith("metrics.jsonl")
    trackers.finish()
    trackers.finish()
    assert mine.said == [("start", "run", {"lr": 1}), ("log", {"loss": 0.25}, 1), ("finish", "finished")]


def test_a_class_of_the_users_is_constructed_with_folder_and_options(tmp_path):
    trackers = Trackers(Recorder, tmp_path)
    trackers.start("run", options={"recorder": {"colour": "blue"}})
    made = trackers.get_tracker("recorder")
    assert (made.folder, made.options) == (str(tmp_path), {"colour": "blue"})


def test_other_ranks_get_a_blank_one_and_write_nothing(tmp_path):
    trackers = Trackers("jsonl", tmp_path, is_main=False)
    trackers.start("run", {})
    trackers.log({"loss": 1.0})
    blank = trackers.get_tracker("jsonl", unwrap=True)
    assert isinstance(blank, BlankTracker)
    assert blank.add_histogram("x", [1]).anything() is blank
    trackers.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_a_tracker_that_the_run_lacks(tmp_path):
    with pytest.raises(TrackerError, match="no tracker called 'wandb'") as caught:
        Trackers("jsonl", tmp_path).get_tracker("wandb")
    assert caught.value.code == "tracker-unknown"
    with pytest.raises(TrackerError, match="init_kwargs names wandb"):
        Trackers("jsonl", tmp_path).start("run", options={"wandb": {}})


def test_all_problems_are_raised_at_once_and_on_every_rank(tmp_path):
    class NeedsMoon(Recorder):
        name = "moon"
        requires = ("moon_client",)

    for is_main in (True, False):
        with pytest.raises(
            TrackerError, match=r"3 problems(.|\n)*needs moon_client(.|\n)*leave this tracker out"
        ) as caught:
            Trackers(["sundial", object(), NeedsMoon], tmp_path, is_main=is_main)
        assert [problem.code for problem in caught.value.problems] == [
            "tracker-unknown",
            "tracker-shape",
            "tracker-missing",
        ]


def test_a_missing_tensorboard_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrackerError, match=r"fix: pip install tensorboard$") as caught:
        Trackers("tensorboard", tmp_path)
    assert caught.value.code == "tracker-missing"


def test_all_means_each_that_is_installed(tmp_path):
    assert Trackers("all", tmp_path).names == ["csv", "jsonl", "tensorboard"]
    assert Trackers(None, tmp_path).names == []


def test_a_failing_finish_does_not_keep_the_others_open(tmp_path):
    class Breaks(Recorder):
        name = "breaks"

        def finish(self, status="finished"):
            raise OSError("disk full")

    mine = Recorder()
    trackers = Trackers([mine, Breaks], tmp_path)
    trackers.start("run")
    with pytest.raises(OSError, match="disk full"):
        trackers.finish()
    assert mine.said[-1] == ("finish", "finished")


@pytest.mark.parametrize(("ending", "status"), [("pass", "finished"), ("raise ValueError('boom')", "failed")])
def test_a_script_that_forgets_to_finish_is_finished_at_exit(tmp_path, ending, status):
    script = f"""
        from paceline.observe.trackers.group import Trackers
        trackers = Trackers("jsonl", {str(tmp_path)!r})
        trackers.start("run")
        {ending}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, stderr=subprocess.DEVNULL)
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["status"] == status


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}


def test_numbers_of_numpy_are_numbers() -> None:
    from paceline_lens.trackers.mlflow import MLflowTracker

    tracker = object.__new__(MLflowTracker)
    numbers = tracker.numbers_of({"a": np.float32(0.5), "b": np.int64(3), "c": 1, "d": "text"})
    assert numbers == {"a": 0.5, "b": 3.0, "c": 1} and type(numbers["a"]) is float
