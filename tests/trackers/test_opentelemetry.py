"""OpenTelemetry: what the official SDK sends arrives at an OTLP receiver, also after it was away."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from paceline.base import log
from paceline.base.errors import TrackerError
from paceline.cli.main import main
from paceline.observe.trackers.group import Trackers

pytest.importorskip("opentelemetry.sdk", reason="`make trackers` installs it")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="`make trackers` installs it")

from trackers.otlp_receiver import Receiver

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch):
    log.forget_warnings()
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
    monkeypatch.setenv("PACELINE_TRACKER_FLUSH_S", "10")
    yield receiver
    receiver.close()


def begin(folder: Path, **options) -> Trackers:
    trackers = Trackers("opentelemetry", folder)
    trackers.start("digits", {"lr": 0.1, "model": {"depth": 3}}, **options)
    return trackers


def test_values_with_their_times_and_the_settings(receiver: Receiver, tmp_path: Path) -> None:
    trackers = begin(tmp_path)
    run_id = trackers.get_tracker("opentelemetry").run_id()
    before = time.time_ns()
    for step in range(20):
        trackers.log({"train/loss": step / 2, "top@5": step}, step)
    trackers.log({"odd": math.nan, "high": math.inf}, 20)
    trackers.log({f"layer.{number}": number for number in range(10_000)}, 21)
    trackers.finish()
    assert receiver.values("train/loss") == [step / 2 for step in range(20)]
    assert receiver.values("top_5")[-1] == 19
    assert receiver.values("paceline.step")[:21] == list(range(21))
    assert math.isnan(receiver.values("odd")[0]) and receiver.values("high") == [math.inf]
    assert receiver.values("layer.9999") == [9999]
    assert receiver.values("paceline.finished") == [1]
    attributes, _, when, _ = receiver.points[0]
    assert before - 1e9 < when < time.time_ns()
    assert attributes["service.name"] == "digits" and attributes["service.instance.id"] == run_id
    assert attributes["paceline.config.lr"] == 0.1 and attributes["paceline.config.model.depth"] == 3
    again = begin(tmp_path, goes_on=True)
    assert again.get_tracker("opentelemetry").run_id() == run_id
    again.finish("failed")
    assert receiver.values("paceline.finished") == [1, 0]


def test_a_collector_that_is_away_for_a_while(receiver: Receiver, tmp_path: Path) -> None:
    trackers = begin(tmp_path)
    receiver.status = 503
    for step in range(20):
        trackers.log({"loss": step}, step)
    time.sleep(1)
    receiver.status = 200
    trackers.finish()
    assert receiver.values("loss") == list(range(20))


def test_a_collector_that_is_never_there(tmp_path: Path, monkeypatch, capsys) -> None:
    gone = Receiver()
    gone.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{gone.port}")
    monkeypatch.setenv("PACELINE_TRACKER_FLUSH_S", "1")
    trackers = begin(tmp_path)
    trackers.log({"loss": 1}, 1)
    with pytest.raises(TrackerError, match="paceline trackers") as caught:
        trackers.finish()
    assert caught.value.code == "tracker-unsent"
    back = Receiver(gone.port)
    try:
        assert main(["trackers", str(tmp_path)]) == 0
        assert back.values("loss") == [1]
    finally:
        back.close()
