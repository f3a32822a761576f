"""Delivery: training never waits for a tracker's server, and no value is lost while it does not answer."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.base import log
from paceline.base.errors import TrackerError
from paceline.cli.main import main
from paceline.observe.trackers.group import Trackers
from paceline.observe.trackers.run_ids import RunIds
from paceline.observe.trackers.tracker import TRACKERS
from paceline_lens.trackers.delivery import Delivery, DeliveryEntry, RefusedError, Sender
from paceline_lens.trackers.mlflow import MLflowTracker


class Server:
    """What arrives, and whether it answers."""

    def __init__(self) -> None:
        self.entries: list[DeliveryEntry] = []
        self.requests: list[int] = []
        self.is_up = True
        self.pause_s = 0.0
        self.refuses = ""

    def take(self, entries) -> None:
        if not self.is_up:
            raise ConnectionError("connection refused")
        time.sleep(self.pause_s)
        names = [name for entry in entries for name in entry.values]
        if self.refuses in names:
            raise RefusedError(f"no such name: {self.refuses}")
        self.requests.append(len(names))
        self.entries += entries

    def values(self, name: str) -> list[tuple[int | None, float]]:
        return [(entry.step, entry.values[name]) for entry in self.entries if name in entry.values]


class ToyTracker:
    """A tracker on a server, as a file of its own could have it."""

    name = "toy"
    requires = ()
    server = Server()

    def __init__(self, folder=None) -> None:
        self.said: list[str] = []
        self.id = "r1"

    def run_id(self):
        return self.id

    def resume(self, run_id) -> None:
        self.said.append(f"goes on with {run_id}")
        self.id = run_id

    def start(self, run, config) -> None:
        self.said.append("start")

    def log(self, values, step=None) -> None:
        raise AssertionError("values are delivered")

    def finish(self, status="finished") -> None:
        self.said.append(status)

    def address(self):
        return {"id": self.id, "host": "nowhere"}

    def numbers_of(self, values):
        return dict(values)

    @staticmethod
    def send(address, entries) -> None:
        assert address["host"] == "nowhere"
        ToyTracker.server.take(entries)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    log.forget_warnings()
    server = Server()
    monkeypatch.setattr(ToyTracker, "server", server)
    return server


def delivery(folder: Path, **options) -> Delivery:
    return Delivery(ToyTracker(), folder, interval_s=0.01, **options)


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def unsent(folder: Path) -> list[Path]:
    return sorted(folder.rglob("unsent-*"))


def test_values_arrive_in_order_with_steps_and_times(server: Server, tmp_path: Path) -> None:
    sent = delivery(tmp_path)
    before = time.time()
    for step in range(100):
        sent.put({"loss": step / 2, "odd": math.nan if step else -math.inf}, step)
    assert sent.finish("finished", 5) is None
    assert server.values("loss") == [(step, step / 2) for step in range(100)]
    assert server.values("odd")[0] == (0, -math.inf) and math.isnan(server.values("odd")[1][1])
    assert all(before - 1 < entry.t < time.time() + 1 for entry in server.entries)
    assert server.entries[-1].status == "finished"
    assert unsent(tmp_path) == []


def test_a_slow_server_does_not_slow_the_step(server: Server, tmp_path: Path) -> None:
    server.pause_s = 0.05
    sent = delivery(tmp_path)
    began = time.perf_counter()
    for step in range(200):
        sent.put({"loss": step}, step)
    assert time.perf_counter() - began < 0.5  # 200 requests would take 10 s
    assert sent.finish("finished", 5) is None
    assert server.values("loss") == [(step, step) for step in range(200)]
    assert len(server.requests) < 20


def test_an_outage_is_said_once_and_nothing_is_lost(server: Server, tmp_path: Path, caplog) -> None:
    sent = delivery(tmp_path, longest_pause_s=0.02)
    sent.put({"loss": 0}, 0)
    until(lambda: server.entries)
    server.is_up = False
    for step in range(1, 50):
        sent.put({"loss": step}, step)
    until(lambda: sent.error is not None)
    assert unsent(tmp_path)[0].read_bytes().count(b"\n") >= 50
    server.is_up = True
    assert sent.finish("finished", 5) is None
    assert server.values("loss") == [(step, step) for step in range(50)]
    assert caplog.text.count("does not answer: connection refused") == 1
    assert caplog.text.count("answers again") == 1


def test_the_file_stays_small_while_the_server_answers(server: Server, tmp_path: Path) -> None:
    sent = delivery(tmp_path)
    sizes = []
    for step in range(5):
        sent.put({"loss": step}, step)
        until(lambda step=step: len(server.entries) > step)
        until(lambda: sent.path.read_bytes().count(b"\n") == 1)
        sizes.append(sent.path.stat().st_size)
    assert len(set(sizes)) == 1
    sent.finish("finished", 5)


def test_ten_thousand_names_are_divided_into_requests(server: Server, tmp_path: Path) -> None:
    sent = delivery(tmp_path)
    sent.put({f"name {number}": number for number in range(10_000)}, 3)
    assert sent.finish("finished", 5) is None
    assert sum(server.requests) == 10_000 and max(server.requests) == 1000
    assert server.values("name 9999") == [(3, 9999)]


def test_what_is_refused_is_named_and_the_rest_arrives(server: Server, tmp_path: Path, caplog) -> None:
    server.refuses = "top@5"
    sent = delivery(tmp_path)
    for step in range(10):
        sent.put({"loss": step, "top@5": step, "lr": 1}, step)
    problem = sent.finish("finished", 5)
    assert problem is not None and problem.code == "tracker-refused" and "top@5" in str(problem)
    assert server.values("loss") == [(step, step) for step in range(10)] and len(server.values("lr")) == 10
    assert caplog.text.count("refuses top@5") == 1
    assert unsent(tmp_path) == []


def test_a_refusal_without_a_message_is_named_by_its_class() -> None:
    def refuse(address: object, entries: object) -> None:
        raise RefusedError

    sender = Sender("server", refuse, {})
    sender.send([DeliveryEntry(0.0, 1, {"loss": 1.0})])
    assert sender.refused == {"loss": "RefusedError"}


def test_a_full_file_says_what_is_lost(server: Server, tmp_path: Path, caplog) -> None:
    server.is_up = False
    sent = delivery(tmp_path, max_bytes=1000)
    for step in range(100):
        sent.put({"loss": step}, step)
    assert "values for toy are lost from step" in caplog.text
    assert sent.path.stat().st_size < 1100
    server.is_up = True
    problem = sent.finish("finished", 5)
    assert problem is not None and f"{sent.lost} values" in str(problem) and sent.lost > 50
    assert len(server.values("loss")) + sent.lost == 100


def test_a_server_that_is_never_back(server: Server, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(TRACKERS, "_added", {"toy": ToyTracker})
    server.is_up = False
    sent = delivery(tmp_path)
    sent.put({"loss": 1.0}, 1)
    (path,) = unsent(tmp_path)
    assert main(["trackers", str(path)]) == 1
    assert "belongs to a run that goes on" in capsys.readouterr().err
    problem = sent.finish("finished", 0.3)
    assert problem is not None and problem.code == "tracker-unsent"
    assert re.search(r"connection refused(.|\n)*tried for 0.3 s(.|\n)*`paceline trackers /", str(problem))
    until(lambda: not any(thread.name == "tracker toy" for thread in threading.enumerate()))
    assert main(["trackers", str(tmp_path)]) == 1
    assert "[tracker-unsent]" in capsys.readouterr().err
    server.is_up = True
    assert main(["trackers", str(tmp_path)]) == 0
    assert "1 values sent" in capsys.readouterr().out
    assert server.values("loss") == [(1, 1.0)] and server.entries[-1].status == "finished"
    assert unsent(tmp_path) == []


@pytest.mark.parametrize("content", ["", "hello\n", '{"version": 9, "tracker": "toy", "address": {}}\n'])
def test_a_file_that_is_none_of_ours(tmp_path: Path, content: str, capsys) -> None:
    path = tmp_path / "unsent-x.jsonl"
    path.write_text(content)
    assert main(["trackers", str(path)]) == 1
    assert "[tracker-file]" in capsys.readouterr().err
    assert path.read_text() == content


def test_no_file_at_all(tmp_path: Path, capsys) -> None:
    assert main(["trackers", str(tmp_path / "none.jsonl")]) == 1
    assert "[tracker-file]" in capsys.readouterr().err
    assert main(["trackers", str(tmp_path)]) == 0
    assert "no values wait" in capsys.readouterr().out


def test_values_of_a_process_that_died_are_sent_by_the_next(server: Server, tmp_path: Path) -> None:
    server.is_up = False
    first = delivery(tmp_path, longest_pause_s=0.02)
    first.put({"loss": 1}, 1)
    first._abandoned.set()  # as if it had died: half a line is left behind
    first._work.set()
    first._thread.join(5)
    os.pwrite(first._file, b"[17000", first._end)
    os.close(first._file)
    server.is_up = True
    second = delivery(tmp_path)
    second.put({"loss": 2}, 2)
    assert second.finish("finished", 5) is None
    assert server.values("loss") == [(1, 1), (2, 2)]


def test_a_fork_says_that_it_cannot_log(server: Server, tmp_path: Path) -> None:
    sent = delivery(tmp_path)
    sent._owner = 1  # as a fork sees it
    with pytest.raises(TrackerError, match="log them there") as caught:
        sent.put({"loss": 1}, 1)
    assert caught.value.code == "tracker-forked"
    assert sent.finish("finished", 5) is None and sent.path.exists()  # it is the other process's file
    sent._owner = os.getpid()
    assert sent.finish("finished", 5) is None


def test_trackers_go_on_in_their_runs_where_training_does(server: Server, tmp_path: Path, monkeypatch) -> None:
    def started(id: str, **options) -> list[str]:
        tracker = ToyTracker()
        tracker.id = id
        trackers = Trackers(tracker, tmp_path)
        trackers.start("digits", **options)
        trackers.finish()
        return tracker.said

    assert started("r1") == ["start", "finished"]
    assert started("r2", goes_on=True) == ["goes on with r1", "start", "finished"]
    assert started("r3") == ["start", "finished"]
    monkeypatch.setenv("PACELINE_RUN", "launched")
    assert started("r4") == ["start", "finished"]
    assert started("r5") == ["goes on with r4", "start", "finished"]  # its launcher has started it again
    other = ToyTracker()
    other.name, other.id = "other", "r9"
    Trackers(other, tmp_path).start("digits")  # another group of the same launch
    assert RunIds(tmp_path / "digits").earlier(goes_on=False) == {"toy": "r4", "other": "r9"}
    monkeypatch.setenv("PACELINE_RUN", "another")
    assert started("r6") == ["start", "finished"]
    (tmp_path / "digits" / "trackers.json").write_text('{"version": 2}')
    assert started("r7", goes_on=True) == ["start", "finished"]


class Client:
    """Stands for the module `mlflow`, and notes how a run ends."""

    MlflowException = ConnectionError

    def __init__(self) -> None:
        self.ended: list[object] = []

    def end_run(self, **options: object) -> None:
        self.ended.append(options.get("status", "FINISHED"))

    def get_tracking_uri(self) -> str:
        return "nowhere"


@pytest.mark.parametrize("is_up", [True, False])
def test_mlflow_delivers_what_is_logged(server: Server, tmp_path: Path, monkeypatch, is_up: bool) -> None:
    client = Client()
    monkeypatch.setitem(sys.modules, "mlflow", client)
    monkeypatch.setattr(MLflowTracker, "send", staticmethod(lambda address, entries: server.take(entries)))
    monkeypatch.setattr(MLflowTracker, "run_id", lambda self: "r1")
    monkeypatch.setenv("PACELINE_TRACKER_FLUSH_S", "5" if is_up else "0.1")
    server.is_up = is_up
    tracker = MLflowTracker(tmp_path)
    tracker._run, tracker._run_folder = object(), tmp_path / "digits"
    (tmp_path / "digits").mkdir()
    for step in range(5):
        tracker.log({"loss": step}, step)
    if is_up:
        tracker.finish()
        assert server.values("loss") == [(step, step) for step in range(5)]
        assert unsent(tmp_path) == []
    else:
        with pytest.raises(TrackerError, match=r"tried for 0.1 s") as caught:
            tracker.finish("failed")
        assert caught.value.code == "tracker-unsent" and len(unsent(tmp_path)) == 1
    assert client.ended == ["FINISHED"]
