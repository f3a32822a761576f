"""MLflow's real server: what arrives, and a server that is killed while a run goes on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from free_ports import free_port

from paceline.base import log
from paceline.base.errors import TrackerError
from paceline.cli.main import main
from paceline.observe.trackers.group import Trackers

mlflow = pytest.importorskip("mlflow", reason="`make trackers` installs it")
pytest.importorskip("flask", reason="the server's; `make trackers` installs it")

from trackers.mlflow_server import MLflowServer  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    server = MLflowServer(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "none")  # the client sets it; put back with the others


@pytest.fixture
def server(running: MLflowServer, monkeypatch: pytest.MonkeyPatch):
    """It answers when a test begins."""
    log.forget_warnings()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.uri)
    mlflow.set_tracking_uri(running.uri)
    yield running
    if running._process is None:
        running.start()


def history(run_id: str, name: str) -> list[tuple[int, float]]:
    client = mlflow.MlflowClient()
    points = sorted(client.get_metric_history(run_id, name), key=lambda point: point.step)
    return [(point.step, point.value) for point in points]


def status(run_id: str) -> str:
    return mlflow.MlflowClient().get_run(run_id).info.status


def begin(folder: Path, **options) -> tuple[Trackers, str]:
    trackers = Trackers("mlflow", folder)
    trackers.start("digits", {"lr": 0.1, "model": {"depth": 3}}, **options)
    return trackers, trackers.get_tracker("mlflow").run_id()


def test_values_steps_settings_and_status(server: MLflowServer, tmp_path: Path) -> None:
    trackers, run_id = begin(tmp_path)
    for step in range(20):
        trackers.log({"loss": 1 / (step + 1), "train/top 5": step}, step=step)
    trackers.log({"odd": math.nan, "high": math.inf, "low": -math.inf}, step=7)
    assert trackers.get_tracker("mlflow", unwrap=True).info.run_id == run_id
    trackers.finish()
    assert history(run_id, "loss") == [(step, 1 / (step + 1)) for step in range(20)]
    assert history(run_id, "train/top 5")[-1] == (19, 19.0)
    assert math.isnan(history(run_id, "odd")[0][1])
    assert history(run_id, "high")[0][1] > 1e308 and history(run_id, "low")[0][1] < -1e308
    assert mlflow.MlflowClient().get_run(run_id).data.params == {"lr": "0.1", "model": "{'depth': 3}"}
    assert status(run_id) == "FINISHED"
    assert list((tmp_path / "digits").glob("unsent*")) == []


def test_a_run_that_goes_on(server: MLflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers, run_id = begin(tmp_path)
    trackers.log({"loss": 1.0}, step=1)
    trackers.finish("failed")
    assert status(run_id) == "FAILED"
    again = Trackers("mlflow", tmp_path)
    again.start("digits", {"lr": 0.2, "procs": 4}, goes_on=True)
    assert again.get_tracker("mlflow").run_id() == run_id and status(run_id) == "RUNNING"
    again.log({"loss": 0.5}, step=2)
    again.finish()
    assert history(run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert mlflow.MlflowClient().get_run(run_id).data.params["procs"] == "4"
    assert "lr differ now" in caplog.text
    _, anew = begin(tmp_path)
    mlflow.end_run()
    assert anew != run_id


def test_ten_thousand_names(server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TRACKER_FLUSH_S", "200")  # the server takes seconds for each 1000
    trackers, run_id = begin(tmp_path)
    began = time.perf_counter()
    trackers.log({f"layer/{number}/norm": number for number in range(10_000)}, step=1)
    assert time.perf_counter() - began < 1
    trackers.finish()
    assert history(run_id, "layer/9999/norm") == [(1, 9999.0)]


def test_a_name_that_mlflow_refuses(server: MLflowServer, tmp_path: Path) -> None:
    trackers, run_id = begin(tmp_path)
    for step in range(50):
        trackers.log({"loss": step, "top@5": step}, step=step)
    with pytest.raises(TrackerError, match=r"top@5") as caught:
        trackers.finish()
    assert caught.value.code == "tracker-refused"
    assert len(history(run_id, "loss")) == 50
    assert status(run_id) == "FINISHED"


def test_a_server_that_is_killed_and_comes_back(
    server: MLflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers, run_id = begin(tmp_path)
    longest_s = 0.0
    times = []
    for step in range(120):
        if step == 40:
            server.kill()
        if step == 80:
            server.start()
        began = time.perf_counter()
        trackers.log({"loss": 1.0 / (step + 1)}, step=step)
        longest_s = max(longest_s, time.perf_counter() - began)
        times.append(time.time())
        time.sleep(0.05)
    trackers.finish()
    assert longest_s < 0.1  # it waits for no network
    assert history(run_id, "loss") == [(step, 1.0 / (step + 1)) for step in range(120)]
    points = sorted(mlflow.MlflowClient().get_metric_history(run_id, "loss"), key=lambda point: point.step)
    assert all(abs(point.timestamp / 1000 - when) < 0.5 for point, when in zip(points, times, strict=True))
    assert "does not answer" in caplog.text and "answers again" in caplog.text
    assert status(run_id) == "FINISHED"


def test_a_server_that_is_never_back(
    server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_TRACKER_FLUSH_S", "3")
    trackers, run_id = begin(tmp_path)
    server.kill()
    for step in range(5):
        trackers.log({"loss": step}, step=step)
    began = time.perf_counter()
    with pytest.raises(TrackerError, match="tried for 3 s") as caught:
        trackers.finish()
    assert time.perf_counter() - began < 10
    assert caught.value.code == "tracker-unsent"
    (path,) = (tmp_path / "digits").glob("unsent*")
    assert f"`paceline trackers {path}`" in str(caught.value)
    assert main(["trackers", str(path)]) == 1
    assert "tracker-unsent" in capsys.readouterr().err
    server.start()
    assert main(["trackers", str(tmp_path)]) == 0
    assert "5 values sent" in capsys.readouterr().out
    assert history(run_id, "loss") == [(step, float(step)) for step in range(5)]
    assert status(run_id) == "FINISHED" and not path.exists()


DIES = """
    import os, signal, sys, time
    from paceline.observe.trackers.group import Trackers
    trackers = Trackers("mlflow", sys.argv[1])
    trackers.start("digits")
    print(trackers.get_tracker("mlflow").run_id(), flush=True)
    input()
    for step in range(5):
        trackers.log({"loss": step}, step=step)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_values_of_a_process_that_died_are_sent_by_the_one_that_goes_on(server: MLflowServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(DIES), str(tmp_path)]
    environment = {**os.environ, "PACELINE_RUN": "launched-once"}
    process = subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True)
    run_id = process.stdout.readline().strip()
    server.kill()
    process.communicate("\n", timeout=60)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RUN", "launched-once")  # the same launch: no checkpoint is needed
        trackers, again = begin(tmp_path)
        assert again == run_id
        trackers.log({"loss": 5.0}, step=5)
        trackers.finish()
    assert history(run_id, "loss") == [(step, float(step)) for step in range(6)]


def test_no_server_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    began = time.perf_counter()
    with pytest.raises(TrackerError, match="sqlite:///") as caught:
        begin(tmp_path)
    assert caught.value.code == "tracker-start"
    assert time.perf_counter() - began < 10


def test_a_database_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    trackers, run_id = begin(tmp_path)
    trackers.log({"loss": 1.0}, step=1)
    trackers.finish()
    assert history(run_id, "loss") == [(1, 1.0)]
