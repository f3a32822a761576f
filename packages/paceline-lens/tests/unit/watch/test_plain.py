"""A run in lines."""

from __future__ import annotations

import math
from pathlib import Path

from synthetic_journal import STARTED, write_synthetic
from watched_run import EVEN, WatchedRun, moved

from paceline_lens.watch.journal import JournalReader
from paceline_lens.watch.plain import PlainLog, number, status
from paceline_lens.watch.records import (
    CheckpointSaved,
    ErrorShown,
    LauncherEnded,
    PlanMade,
    RoundStarted,
    Stuck,
    ValuesLogged,
)
from paceline_lens.watch.view import RunView


def test_a_run_says_which_rank_and_why(tmp_path: Path) -> None:
    reader = JournalReader(write_synthetic(tmp_path, exit_code=None))
    view = RunView(reader.header)
    for line in reader.read():
        view.add(line)
    text = "\n".join(PlainLog().lines(view.snapshot(STARTED + 60)))
    assert "4 processes started on 2 hosts" in text
    assert "step 240 of 240 (100%)" in text and "250 ms a step, 256 samples/s, 262k tokens/s, MFU 48.5%" in text
    assert "Rank 3 on node2 waits 41% of its time for its data, the others 2%." in text
    assert "checkpoint at step 240: 1.5 GB, the loop waited 0.2 s" in text


def test_a_run_of_which_nothing_is_known() -> None:
    assert status(WatchedRun(2).snapshot()) == "starting: 0 of 2 ranks have begun, 0 s"


def test_numbers_are_short() -> None:
    shown = [
        number(value) for value in (0.00012345, 1.23456, 99.94, 256.4, 9999.0, 10_500.0, 999_999.0, 2.5e6, 1e15, -3e9)
    ]
    assert shown == ["0.000123", "1.23", "99.9", "256", "9999", "10.5k", "1000k", "2.5M", "1000T", "-3G"]
    assert number("nan") == "nan"


def test_lines_say_each_thing_once() -> None:
    run, log = WatchedRun(4), PlainLog(interval_s=10)
    lines: list[str] = []

    def second(*records: object) -> list[str]:
        for record in records:
            run.add(record, role="launcher")  # type: ignore[arg-type]
        new = [line.split(" ", 1)[1] for line in log.lines(run.snapshot())]
        lines.extend(new)
        return new

    assert second(RoundStarted(0, 4, 2)) == ["starting: 0 of 4 ranks have begun, 0 s", "4 processes started on 2 hosts"]
    run.hello()
    run.add(PlanMade())
    for _ in range(20):
        run.train(1)
        run.add(ValuesLogged(run.step, {"loss": 1.5}))
        second()
    assert lines[-1] == "step 80 of 10,000 (1%), loss 1.5, 250 ms a step, 256 samples/s, 41 min left"
    assert sum(line.startswith("step") for line in lines) == 2
    slow, others = moved("data", 250.0)
    new = []
    for _ in range(60):
        run.train(1, others, {3: slow})
        new += second()
    assert sum("waits" in line and "fix" not in line for line in new) == 1
    new = []
    for _ in range(60):
        run.train(1)
        new += second()
    assert sum(line.startswith("over: Rank 3 on node2 waits") for line in new) == 1
    run.now += 1
    assert "checkpoint at step 5: 2.0 GB, the loop waited 0.5 s" in second(CheckpointSaved(5, "c", 2 * 10**9, 0.5, 1.0))
    run.now += 1
    assert "!! the checkpoint at step 6 was not written: full" in second(
        CheckpointSaved(6, "c", ok=False, reason="full")
    )
    run.now += 1
    assert "!! 3 ranks in all_reduce" in second(Stuck("3 ranks in all_reduce"))
    run.now += 1
    new = second(
        ErrorShown(2, "node2", "worker-failed", "ValueError: bad\n  at train.py:3"), LauncherEnded(1, "rank 2 failed.")
    )
    assert "!! rank 2: ValueError: bad" in new
    assert (
        new[-1] == f"ended after {run.now - run.view.header.started:.0f} s with exit code 1: rank 2 failed."
        or "min" in new[-1]
    )


def test_an_event_of_a_clock_that_runs_behind_is_shown() -> None:
    run, log = WatchedRun(4), PlainLog()
    run.add(ErrorShown(0, "node0", "worker-failed", "first"), role="launcher")
    assert log.lines(run.snapshot())[-1].endswith("!! rank 0: first")
    run.now -= 5
    run.add(ErrorShown(1, "node1", "worker-failed", "second"), role="launcher")
    run.now += 5
    lines = log.lines(run.snapshot())
    assert lines[-1].endswith("!! rank 1: second") and "first" not in "".join(lines)


def test_a_stuck_run_says_so_in_its_status() -> None:
    run = WatchedRun(4)
    run.hello()
    run.train(20, EVEN)
    run.add(ValuesLogged(run.step, {"loss": math.nan}))
    run.stand(20, {0: "reduce", 1: "reduce", 2: "reduce", 3: "data"})
    assert status(run.snapshot()).startswith("STUCK for 20 s, step 80 of 10,000 (1%), loss nan")
