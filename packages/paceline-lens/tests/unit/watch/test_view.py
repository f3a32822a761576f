"""The snapshot of a run: what it holds, that it is plain JSON, and that it stays small however long the run."""

from __future__ import annotations

import json
import math
import random

import pytest
from synthetic_journal import STARTED, write_synthetic
from watched_run import WatchedRun

from paceline_lens.watch import view as view_module
from paceline_lens.watch.journal import JournalReader
from paceline_lens.watch.records import (
    AnomalyFound,
    ErrorShown,
    Hello,
    LauncherEnded,
    PlanMade,
    RoundStarted,
    Stuck,
    Tick,
    ValuesLogged,
)
from paceline_lens.watch.series import AllSeries, Series
from paceline_lens.watch.view import RunView


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict:
    reader = JournalReader(write_synthetic(tmp_path_factory.mktemp("run"), seconds=60, exit_code=None, nan_at=50))
    view = RunView(reader.header)
    for line in reader.read():
        view.add(line)
    return view.snapshot(STARTED + 60)


def test_every_key_is_documented(synthetic: dict) -> None:
    documented = view_module.__doc__ or ""
    names = {
        word.strip(",:") for line in documented.splitlines() for word in line[:50].replace(":", ",").split(",")[0:6]
    }
    missing = [
        key for key in synthetic if key not in {name.strip().split(" ")[0] for name in names} and key not in documented
    ]
    assert not missing


def test_it_is_plain_json(synthetic: dict) -> None:
    assert json.loads(json.dumps(synthetic, allow_nan=False)) == synthetic


def test_progress_and_speed(synthetic: dict) -> None:
    assert synthetic["state"] == "running"
    assert synthetic["progress"]["step"] == 240
    assert synthetic["speed"]["recent"]["steps_per_s"] == pytest.approx(4.0, rel=0.01)
    assert synthetic["speed"]["recent"]["samples_per_s"] == pytest.approx(256.0, rel=0.01)
    assert synthetic["speed"]["mean"]["tokens_per_s"] == pytest.approx(262_144, rel=0.01)
    assert synthetic["speed"]["recent"]["mfu"] == pytest.approx(1.2e14 * 4 / 9.9e14, rel=0.01)
    assert synthetic["speed"]["forecast"]["step_ms"] == 230.0
    assert synthetic["memory"]["peak_rank"] == 3
    assert synthetic["checkpoints"]["count"] == 3
    assert synthetic["anomalies"]["last"][0]["value"] == "nan"


def test_the_heat_map(synthetic: dict) -> None:
    heat = synthetic["heat"]
    data = heat["phases"].index("data")
    assert heat["ranks"] == [0, 1, 2, 3]
    assert heat["share"][3][data] == pytest.approx(0.41, abs=0.01)
    assert sum(heat["share"][0]) == pytest.approx(1.0, abs=0.001)
    assert sum(heat["ms_per_step"][0]) == pytest.approx(250.0, rel=0.01)


def test_nan_and_infinity_are_kept() -> None:
    run = WatchedRun(1)
    run.hello()
    for step, value in enumerate((1.0, math.nan, math.inf, -math.inf, 2.0)):
        run.add(ValuesLogged(step, {"loss": value}))
    series = run.snapshot()["series"]["loss"]
    assert [value for _, value in series["points"]] == [1.0, "nan", "inf", "-inf", 2.0]
    assert series["last"] == 2.0


def test_time_left_and_a_run_that_stands() -> None:
    run = WatchedRun(2)
    run.hello()
    run.train(50)
    assert run.snapshot()["progress"]["seconds_left"] == pytest.approx((10_000 - 200) / 4, rel=0.01)
    run.stand(30, {0: "reduce", 1: "data"})
    snapshot = run.snapshot()
    assert snapshot["speed"]["recent"]["steps_per_s"] == pytest.approx(2.0, rel=0.05)
    assert snapshot["speed"]["recent"]["usual_step_ms"] == pytest.approx(250.0, rel=0.01)
    assert snapshot["standing_s"] == pytest.approx(30.0)


def test_states() -> None:
    run = WatchedRun(2)
    assert run.snapshot()["state"] == "starting"
    run.hello()
    run.stand(3, {0: "rest", 1: "rest"})
    assert run.snapshot()["state"] == "starting"
    run.train(10)
    assert run.snapshot()["state"] == "running"
    run.add(ErrorShown(1, "node1", "worker-failed", "ValueError"), role="launcher")
    run.add(LauncherEnded(3, "rank 1 failed"), role="launcher")
    run.now += 1000
    snapshot = run.snapshot()
    assert (snapshot["state"], snapshot["exit_code"], snapshot["why"]) == ("ended", 3, "rank 1 failed")
    assert snapshot["now"] == run.now - 1000
    assert snapshot["findings"] == []
    assert snapshot["errors"][0]["code"] == "worker-failed"


def test_a_launcher_that_has_gone() -> None:
    run = WatchedRun(2)
    run.hello()
    run.train(10)
    run.now += 500
    assert run.snapshot()["state"] == "stuck"
    run.view.launcher_has_gone(run.now)
    snapshot = run.snapshot()
    assert (snapshot["state"], snapshot["exit_code"], snapshot["why"]) == ("ended", None, "its launcher has gone")
    assert snapshot["now"] == run.now - 500


def test_a_job_that_was_queued_again_goes_on_in_the_same_folder() -> None:
    run = WatchedRun(2)
    run.add(RoundStarted(0, 2), role="launcher")
    run.hello()
    run.train(10)
    run.add(LauncherEnded(75, "preempted"), role="launcher")
    assert run.snapshot()["state"] == "ended"
    run.now += 100
    run.add(RoundStarted(0, 2), rank=1, role="launcher")
    run.hello()
    run.step = 20
    run.train(10)
    snapshot = run.snapshot()
    assert (snapshot["state"], snapshot["restart_steps"], snapshot["findings"]) == ("running", [40], [])
    assert snapshot["speed"]["mean"]["steps_per_s"] == pytest.approx(4.0)
    run.add(LauncherEnded(0), rank=1, role="launcher")
    assert (run.snapshot()["state"], run.snapshot()["exit_code"]) == ("ended", 0)


def test_a_host_that_leaves_does_not_end_the_run() -> None:
    run = WatchedRun(4)
    run.add(RoundStarted(0, 4, 2), role="launcher")
    run.hello()
    run.train(10)
    run.add(LauncherEnded(1, "this host was left out"), rank=1, role="launcher")
    run.train(2)
    assert run.snapshot()["state"] == "running"
    run.add(LauncherEnded(0), role="launcher")
    assert (run.snapshot()["state"], run.snapshot()["exit_code"]) == ("ended", 0)


def test_a_restart_with_fewer_ranks() -> None:
    run = WatchedRun(4)
    run.hello()
    run.train(10)
    for step in range(1, 41):
        run.add(ValuesLogged(step, {"loss": 1.0, "epoch_loss": 5.0}))
    run.add(RoundStarted(1, 2, 1, 1, "node2 was lost", lost=["node2"]), role="launcher")
    run.ranks = 2
    run.hello(restart=1)
    run.step = 20
    run.stand(2, {0: "rest", 1: "rest"}, steps={0: 0, 1: 0})
    assert len(run.snapshot()["series"]["loss"]["points"]) == 40  # nothing is forgotten before it is done again
    run.train(5)
    run.add(ValuesLogged(21, {"loss": 2.0}))
    snapshot = run.snapshot()
    assert [row["rank"] for row in snapshot["ranks"]] == [0, 1]
    assert (snapshot["restarts"], snapshot["restart_steps"], snapshot["world"]["procs"]) == (1, [40], 2)
    assert snapshot["rounds"][-1]["lost"] == ["node2"]
    assert snapshot["series"]["loss"]["points"][-2:] == [[20, 1.0], [21, 2.0]]
    assert snapshot["series"]["loss"]["by"] == "step"
    assert snapshot["speed"]["mean"]["steps_per_s"] == pytest.approx(4.0)


def test_a_script_whose_steps_go_back() -> None:
    run = WatchedRun(1)
    for _ in range(3):
        for step in range(5):
            run.add(ValuesLogged(step, {"loss": float(step)}))
    series = run.snapshot()["series"]["loss"]
    assert series["by"] == "number"
    assert [x for x, _ in series["points"]] == list(range(15))


def test_ten_thousand_names() -> None:
    run = WatchedRun(1)
    for step in range(5):
        run.add(ValuesLogged(step, {f"name {index}": float(step) for index in range(10_000)}))
    snapshot = run.snapshot()
    assert len(snapshot["names"]) == 10_000
    assert list(snapshot["series"]) == [f"name {index}" for index in range(24)]
    asked = run.snapshot(names=["name 9999", "no such"])["series"]
    assert list(asked) == ["name 9999"]
    assert asked["name 9999"]["last"] == 4.0


def test_more_names_than_are_kept() -> None:
    series = AllSeries()
    series.MOST_NAMES = 10
    for step in range(2):
        series.add(step, {f"name {index}": 1.0 for index in range(15)})
    assert (len(series.by_name), series.left_out) == (10, 10)


def test_a_long_series_keeps_its_extremes() -> None:
    series, chance = Series(), random.Random(0)
    for step in range(100_000):
        value = {31_415: 100.0, 50_000: math.nan, 77_777: -50.0}.get(step, chance.random())
        series.add(step, value)
        assert len(series._buckets) <= 660
    points = series.points()
    assert len(points) <= 2_000
    assert [31_415, 100.0] in points
    assert [50_000, "nan"] in points
    assert [77_777, -50.0] in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[-1][0] == 99_999


def test_a_run_of_days_stays_small() -> None:
    run = WatchedRun(2)
    run.hello()
    run.add(PlanMade("plan", [], 200.0, 1 << 30, 1e9))
    sizes = []
    for _ in range(2):
        for _ in range(40):
            run.train(100, memory=1 << 30, memory_peak=2 << 30)
            run.add(AnomalyFound(run.step, "nan", math.nan, None, "log", "text"))
            run.add(Stuck("text"), role="launcher")
        sizes.append(len(json.dumps(run.snapshot())))
    assert sizes[1] < 1.5 * sizes[0] + 20_000
    assert sizes[1] < 400_000


def test_many_ranks() -> None:
    run = WatchedRun(1024)
    run.hello()
    run.train(2)
    assert len(run.snapshot()["heat"]["share"]) == 1024


def test_a_tick_of_an_unknown_rank_and_phase() -> None:
    run = WatchedRun(2)
    for step in (4, 8):
        run.add(Tick(step, ms={"a new phase": 10.0}, steps=4), 1)
    snapshot = run.snapshot()
    assert snapshot["heat"]["share"][0][-1] == 1.0
    run.add(Hello(rank=0, host="node1"), 0)
    assert [row["rank"] for row in run.snapshot()["ranks"]] == [0, 1]
