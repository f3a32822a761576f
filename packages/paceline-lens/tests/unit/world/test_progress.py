"""When a run counts as stuck, by a clock that the tests turn: a false alarm is the worst failure."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import pytest

from paceline_lens.hangs.host import HostWatch
from paceline_lens.hangs.progress import LEAST_S, LOOK_S, Look, Progress, ProgressReport, RankLife, stuck_for


class Rank:
    """A rank whose time is turned by hand; it computes in no look unless a test says so."""

    def __init__(self, stuck_after: str = "20x") -> None:
        self.progress = Progress(stuck_after)
        self.at = 100.0
        self.cpu_s = 0.0
        self.switches = 0

    def steps(self, number: int, each_s: float = 0.5) -> Rank:
        for _ in range(number):
            self.at += each_s
            self.progress.stepped(self.at)
        return self.look()

    def look(self, place: object = "waits", busy_with: str = "") -> Rank:
        self.progress.look(Look(self.at, place, self.cpu_s, self.switches, busy_with))
        return self

    def passes(self, seconds: float, *, cpu: float = 0.0, switches: float = 0.0, places: Iterable[object] = ()) -> Rank:
        """Time with a look a second: how much of it was computed, and how often the main thread went on, each second."""
        each = iter(places)
        for _ in range(int(seconds)):
            self.at += LOOK_S
            self.cpu_s += cpu
            self.switches += int(switches)
            self.look(next(each, "waits"))
        return self

    @property
    def is_stuck(self) -> bool:
        return bool(stuck_for([RankLife(self.report)]))

    @property
    def report(self) -> ProgressReport:
        own = self.progress
        return ProgressReport(0, own.steps, own.still_s, own.limit_s, own.usual_s, own.busy_with)


def test_a_rank_that_stands_still_is_stuck_after_the_least_time() -> None:
    rank = Rank().steps(10)
    assert not rank.passes(LEAST_S - 2).is_stuck
    assert rank.passes(3).is_stuck


def test_the_limit_is_a_multiple_of_the_usual_step() -> None:
    rank = Rank().steps(10, each_s=9.0)
    assert rank.progress.limit_s == 180.0 and rank.progress.usual_s == 9.0
    assert not rank.passes(170).is_stuck and rank.passes(20).is_stuck
    # One step with a long evaluation in it is not the usual one.
    assert Rank().steps(10, each_s=1.0).steps(1, each_s=500.0).progress.usual_s == 1.0


@pytest.mark.parametrize(
    ("setting", "limit_s"), [("300", 300.0), ("1.5", 1.5), ("0", 0.0), ("0x", 0.0), ("200x", 100.0)]
)
def test_the_setting(setting: str, limit_s: float) -> None:
    assert Rank(setting).steps(10).progress.limit_s == limit_s


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_slow_first_step_is_no_standstill(steps: int) -> None:
    rank = Rank()
    if steps:
        rank.steps(steps)
    assert rank.progress.limit_s == 0.0
    assert not rank.passes(100_000).is_stuck


def test_a_long_evaluation_is_no_standstill() -> None:
    computes = Rank().steps(10).passes(5000, cpu=0.9)
    reads_a_stream = Rank().steps(10).passes(5000, switches=50)
    goes_on = Rank().steps(10).passes(5000, places=range(5000))
    assert not computes.is_stuck and not reads_a_stream.is_stuck and not goes_on.is_stuck


@pytest.mark.parametrize("what", ["saving or loading a checkpoint", "compiling", "a debugger"])
def test_what_may_take_long_is_no_standstill(what: str) -> None:
    rank = Rank().steps(10)
    for _ in range(5000):
        rank.at += LOOK_S
        rank.look("the same", what)
    assert not rank.is_stuck
    # The time in it does not count afterwards either.
    assert not rank.passes(50).is_stuck and rank.passes(20).is_stuck


def test_more_looks_a_second_do_not_turn_one_wake_up_into_a_sign_of_life() -> None:
    """`--hang-report-s 1` and debug mode want more looks. A loader that waits wakes up each 5 s."""
    rank = Rank().steps(10)
    for number in range(10 * int(LEAST_S + 2)):
        rank.at += 0.1
        rank.switches += number % 50 == 0
        rank.look()
    assert rank.is_stuck


def test_a_process_that_did_not_run_has_not_been_waiting() -> None:
    """A laptop that slept, or a scheduler that stopped all processes: the clock has gone on without anybody looking."""
    rank = Rank().steps(10).passes(3)
    rank.at += 40_000
    assert not rank.look().is_stuck
    assert rank.passes(60).is_stuck


def test_a_step_ends_the_standstill() -> None:
    rank = Rank().steps(10).passes(100)
    assert rank.is_stuck and not rank.steps(1).is_stuck


STILL = ProgressReport(0, 100, 90.0, 60.0, 0.5)
STUCK = RankLife(STILL)


@pytest.mark.parametrize(
    ("others", "seconds"),
    [
        ([STUCK, STUCK], 90.0),
        # The others wait for one that is slow and alive: `main_process_first`, an evaluation on rank 0, a download.
        ([STUCK, RankLife(replace(STILL, still_s=2.0))], 0.0),
        ([STUCK, RankLife(replace(STILL, busy_with="compiling"))], 0.0),
        # One has not begun, one has left: its script ends, or has just been started.
        ([STUCK, RankLife(replace(STILL, limit_s=0.0))], 0.0),
        ([STUCK, RankLife(None)], 0.0),
        # Ranks with different steps: the longest limit counts.
        ([STUCK, RankLife(replace(STILL, limit_s=95.0))], 0.0),
        # A rank of another host has said that it is alive.
        ([STUCK, RankLife(replace(STILL, others_alive=True))], 0.0),
        # Stopped by a signal: it says nothing, and cannot go on.
        ([STUCK, RankLife(replace(STILL, still_s=0.0), silent_s=70.0, is_stopped=True)], 70.0),
        ([STUCK, RankLife(replace(STILL, still_s=0.0), silent_s=40.0, is_stopped=True)], 0.0),
        # It was stopped before it could say that it has made its first steps.
        ([STUCK, RankLife(replace(STILL, still_s=0.0, limit_s=0.0), silent_s=70.0, is_stopped=True)], 70.0),
        # It was stopped while it compiled, and compiles no longer.
        ([STUCK, RankLife(replace(STILL, still_s=0.0, busy_with="compiling"), silent_s=70.0, is_stopped=True)], 70.0),
        # In a call that lets no other thread run: stuck where nothing computes, and alive where something does.
        ([STUCK, RankLife(replace(STILL, still_s=1.0), silent_s=80.0, idle_s=75.0)], 76.0),
        ([STUCK, RankLife(replace(STILL, still_s=1.0), silent_s=80.0, idle_s=0.5)], 0.0),
        # Its store is gone with another host, which says nothing any more.
        ([STUCK, RankLife(replace(STILL, others_alive=True), silent_s=80.0, idle_s=80.0)], 90.0),
        # A look that comes late on a busy machine is no silence.
        ([STUCK, RankLife(replace(STILL, still_s=3.0), silent_s=4.0, idle_s=4.0)], 0.0),
    ],
)
def test_a_run_is_stuck_where_all_ranks_are(others: list[RankLife], seconds: float) -> None:
    assert stuck_for(others) == seconds


def test_no_ranks_are_not_stuck() -> None:
    assert stuck_for([]) == 0.0


def test_a_rank_that_deletes_its_file_while_the_launcher_looks_is_not_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(HostWatch, "progress_of", lambda *_: STILL)  # read just before the file was deleted
    assert HostWatch(tmp_path).stuck_for([os.getpid()]) == 0
