"""What a launcher does about a standstill of ranks of several hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.job import Job, Target
from paceline.launch.nodes import GatheredPlaces
from paceline.world.stacks.parse import FramePosition, RankPlace
from paceline_lens.hangs import stuck
from paceline_lens.hangs.host import ASKED
from paceline_lens.hangs.progress import ProgressReport
from paceline_lens.hangs.stuck import StuckWatch


class Exchange:
    """Another launcher leads, or none; what it is told is in `answers`."""

    def __init__(self) -> None:
        self.reporter = "node 0 (a)"
        self.notes: list[str] = []
        self.headline = ""  # of what the leader wants
        self.others: list[RankPlace] = []
        self.questions: list[str] = []
        self.answers: list[list[RankPlace]] = []

    def wanted(self) -> str:
        return self.headline

    def answer(self, places: Sequence[RankPlace]) -> None:
        self.answers.append(list(places))
        self.headline = ""

    def asked(self) -> str:
        return ""

    def gather(self, headline: str, own: Callable[[], list[RankPlace]]) -> GatheredPlaces:
        self.questions.append(headline)
        return GatheredPlaces([*own(), *self.others], self.notes, self.reporter)


def stacks(rank: int, line: int, host: str = "") -> RankPlace:
    return RankPlace(rank, os.getpid(), FramePosition("", "/home/me/train.py", line, "main"), host=host)


def watch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_hang: Any, *, others: bool = True
) -> tuple[StuckWatch, Exchange, list[Any]]:
    """A launcher whose one rank, 1, stands still, and what it records."""
    exchange = Exchange()
    recorded: list[Any] = []
    recording = SimpleNamespace(folder=folder, stuck=lambda *entry: recorded.append(entry))
    monkeypatch.setattr(stuck.HostWatch, "places", lambda self, pids, pause: [stacks(rank, 10) for rank in pids])
    monkeypatch.setattr(stuck, "LOOK_S", 0.0)
    monkeypatch.setattr(stuck.HostWatch, "stuck_for", lambda *_: 70.0)
    monkeypatch.setattr(stuck.HostWatch, "progress_of", lambda *_: ProgressReport(1, 9, 70.0, 60.0, 0.5))
    job = Job(Target("script", "train.py"), on_hang=on_hang)
    stacks_of_others = exchange if others else None
    watching = StuckWatch(job, folder, lambda _: None, recording, stacks_of_others)  # type: ignore[arg-type]
    return watching, exchange, recorded


def worker(rank: int = 1, code: int | None = None) -> Any:
    process = SimpleNamespace(rank=rank, local_rank=0)
    return SimpleNamespace(process=process, pid=os.getpid(), poll=lambda: code, frozen_s=lambda: 0.0)


SIGNALS: Any = SimpleNamespace(stacks_wanted=False, stacks_given=lambda: None)


def test_a_member_leaves_the_report_to_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    member, exchange, recorded = watch(tmp_path, monkeypatch, "restart")
    assert member.look([worker()], SIGNALS)
    assert exchange.questions == ["no rank has made progress for 70 s (a step usually takes 0.5 s)"]
    assert recorded == [] and not list(tmp_path.iterdir())
    assert "node 0 (a) reports the stacks of all ranks: no rank has made progress" in capsys.readouterr().err
    assert member.failure is not None and member.failure.stuck == "rank 1 at train.py:10"


def test_a_standstill_that_the_leader_has_seen_first_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, exchange, _ = watch(tmp_path, monkeypatch, "leave")
    exchange.headline = "no rank has made progress for 69 s"
    assert member.look([worker()], SIGNALS)
    assert exchange.questions == [] and exchange.answers == [[stacks(1, 10)]] and member.leaves


def test_a_report_that_somebody_has_asked_for_is_about_no_standstill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, exchange, _ = watch(tmp_path, monkeypatch, "leave")
    exchange.headline = ASKED
    assert member.look([worker()], SIGNALS)
    assert len(exchange.answers) == len(exchange.questions) == 1


def test_where_the_leader_does_not_answer_the_ranks_of_this_host_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    member, exchange, recorded = watch(tmp_path, monkeypatch, "report")
    exchange.reporter, exchange.notes = "", ["node 0 (a) did not answer; the ranks of other hosts are missing here"]
    assert not member.look([worker()], SIGNALS)
    assert "node 0 (a) did not answer; the ranks of other hosts are missing here" in capsys.readouterr().err
    assert "rank 1, pid" in (tmp_path / "stacks-1.txt").read_text() and len(recorded) == 1
    assert not member.look([worker()], SIGNALS) and len(recorded) == 1  # once for a standstill


def test_the_leader_reports_all_and_may_blame_a_rank_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leader, exchange, recorded = watch(tmp_path, monkeypatch, "restart")
    exchange.reporter = ""
    exchange.others = [stacks(0, 10, "b"), stacks(2, 99, "b")]
    assert leader.look([worker()], SIGNALS)
    text = capsys.readouterr().err
    assert "2 ranks (0-1): at /home/me/train.py:10" in text and "rank 2 on b: at /home/me/train.py:99" in text
    assert recorded[0][2] == [2]
    assert leader.failure is not None and leader.failure.rank == 1
    assert leader.failure.stuck == "2 ranks (0-1) at train.py:10, rank 2 on b at train.py:99"


def test_a_host_whose_processes_have_ended_answers_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, exchange, _ = watch(tmp_path, monkeypatch, "report")
    exchange.headline = "why"
    assert not member.look([worker(code=0)], SIGNALS)
    assert exchange.answers == [[]]


def test_a_launcher_of_one_node_reports_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _, recorded = watch(tmp_path, monkeypatch, "restart", others=False)
    assert not alone.look([worker(code=0)], SIGNALS)
    assert alone.look([worker()], SIGNALS) and len(recorded) == 1
    assert "rank 1, pid" in (tmp_path / "stacks-1.txt").read_text()
    assert "rank 1: at /home/me/train.py:10" in capsys.readouterr().err
