"""What is said of a run that is slow, uneven or still; and that nothing is said of an even one."""

from __future__ import annotations

import math
import random

import pytest
from watched_run import EVEN, WatchedRun, moved

from paceline_lens.watch.records import CheckpointSaved, Hello, PlanMade, RoundStarted, Tick, ValuesLogged

ALL_STAND = {0: "reduce", 1: "reduce", 2: "reduce", 3: "reduce"}


def started(ranks: int = 4, **facts: int) -> WatchedRun:
    run = WatchedRun(ranks)
    run.hello(**facts)
    return run


def only(run: WatchedRun) -> dict:
    (finding,) = run.snapshot()["findings"]
    return finding


# -- an even run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_an_even_run_says_nothing(ranks: int) -> None:
    run = started(ranks)
    run.train(60)
    assert run.kinds() == []
    assert run.snapshot()["state"] == "running"


def test_noise_is_no_finding() -> None:
    chance = random.Random(1)
    run = started()
    for _ in range(120):
        noisy = {rank: {phase: ms * chance.uniform(0.6, 1.4) for phase, ms in EVEN.items()} for rank in range(4)}
        run.train(1, others=noisy)
        assert run.kinds() == []


def test_slow_first_steps_are_no_finding() -> None:
    run = started()
    slow, others = moved("data", 400.0)
    run.train(1, others, {3: slow})
    run.train(20)
    assert run.kinds() == []


# -- where the time goes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("wait", ["reduce", "backward", "forward", "pipeline"])
def test_a_slow_loader_is_named_and_not_those_who_wait(ranks: int, wait: str) -> None:
    slow, others = moved("data", 150.0, wait)
    run = started(ranks)
    run.train(40, others, {1: slow})
    finding = run.snapshot()["findings"][0]
    assert (finding["kind"], finding["ranks"]) == ("slow-loader", [1])
    where = " on node1" if ranks > 2 else ""
    assert finding["text"].startswith(f"Rank 1{where} waits 38% of its time for its data, the others 1%.")


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("phase", "wait"), [("forward", "reduce"), ("forward", "backward"), ("backward", "reduce"), ("step", "reduce")]
)
def test_a_slow_rank_is_named_and_not_those_who_wait(ranks: int, phase: str, wait: str) -> None:
    slow, others = moved(phase, 120.0, wait)
    run = started(ranks)
    run.train(40, others, {1: slow})
    finding = run.snapshot()["findings"][0]
    assert (finding["kind"], finding["ranks"], finding["evidence"]["phase"]) == ("slow-rank", [1], phase)
    assert finding["evidence"]["others_ms"] == EVEN[phase]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("phase", ["data", "forward"])
@pytest.mark.parametrize("wait", ["rest", "clip", "step"])
def test_hosts_of_accelerators_wait_where_they_read_a_number(ranks: int, phase: str, wait: str) -> None:
    slow, others = moved(phase, 150.0, wait)
    run = started(ranks)
    for rank in range(ranks):
        run.add(Hello(rank, rank // 2, f"node{rank // 2 + 1}", rank % 2, 5000 + rank, "cuda:0 NVIDIA H200"), rank)
    run.train(40, others, {1: slow})
    finding = run.snapshot()["findings"][0]
    assert (finding["ranks"], finding["evidence"]["phase"]) == ([1], phase)


PIPELINE = {"data": 4.0, "forward": 60.0, "backward": 120.0, "pipeline": 30.0, "step": 20.0, "rest": 16.0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stage_with_more_work_is_no_slow_rank(ranks: int) -> None:
    larger = {**PIPELINE, "forward": 90.0, "backward": 180.0, "pipeline": 10.0}
    others = {**PIPELINE, "pipeline": 100.0}
    run = started(ranks)
    # Messages between stages are waited for inside of torch.distributed.
    waits = {rank: {"waits": {"pipeline": 10.0 if rank == 1 else 300.0}} for rank in range(ranks)}
    run.train(40, others, {1: larger}, waits)
    finding = only(run)
    assert (finding["kind"], finding["ranks"], finding["level"]) == ("long-stage", [1], "note")
    assert "has the longest stage of the pipeline: its forward and backward passes take 270 ms" in finding["text"]
    assert "those of the others 180 ms" in finding["text"]
    assert "split" in finding["fix"] and "paceline doctor" in finding["fix"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_rank_of_a_pipeline_that_is_slow_in_one_phase_is_named(ranks: int, phase: str) -> None:
    # A stage with more work takes longer both forward and backward.
    slow = {**PIPELINE, phase: PIPELINE[phase] + 120.0}
    others = {**PIPELINE, "pipeline": PIPELINE["pipeline"] + 120.0}
    run = started(ranks)
    run.train(40, others, {1: slow})
    finding = run.snapshot()["findings"][0]
    kind = "slow-loader" if phase == "data" else "slow-rank"
    assert (finding["kind"], finding["ranks"], finding["evidence"]["phase"]) == (kind, [1], phase)


def test_two_ranks_of_one_stage_are_one_long_stage() -> None:
    larger = {**PIPELINE, "forward": 90.0, "backward": 180.0, "pipeline": 10.0}
    others = {**PIPELINE, "pipeline": 100.0}
    run = started(4)
    run.train(40, others, {2: larger, 3: larger})
    finding = only(run)
    assert (finding["kind"], finding["ranks"]) == ("long-stage", [2, 3])
    assert finding["text"].startswith("Ranks 2 and 3 on node2 have the longest stage")


def test_two_slow_ranks_are_one_finding() -> None:
    slow, others = moved("forward", 120.0)
    run = started(8)
    run.train(40, others, {1: slow, 4: slow})
    assert only(run)["ranks"] == [1, 4]
    assert only(run)["text"].startswith("Ranks 1 and 4 are slow: the forward pass takes 180 ms")


def test_a_rank_that_logs_too_much() -> None:
    slow, others = moved("rest", 120.0)
    run = started()
    run.train(40, others, {0: slow})
    assert only(run)["ranks"] == [0]
    assert "outside of the training step" in only(run)["text"]


def test_a_rank_with_more_work_that_nobody_waits_for_is_no_finding() -> None:
    run = started()
    run.train(40, others={3: {**EVEN, "rest": EVEN["rest"] + 60.0}})
    assert run.kinds() == []


def test_a_slow_rank_that_has_recovered_is_forgotten() -> None:
    slow, others = moved("forward", 120.0)
    run = started()
    run.train(40, others, {3: slow})
    assert run.kinds() == ["slow-rank"]
    run.train(40)
    assert run.kinds() == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_all_wait_for_data(ranks: int) -> None:
    run = started(ranks)
    run.train(30, {**EVEN, "data": 150.0})
    assert only(run)["kind"] == "data-bound"
    assert ("All 4 ranks wait" if ranks > 1 else "The rank waits") in only(run)["text"]


def test_communication_takes_most() -> None:
    run = started()
    run.train(30, {**EVEN, "reduce": 200.0})
    assert only(run)["kind"] == "communication"
    run = started(1)
    run.train(30, {**EVEN, "reduce": 200.0})
    assert run.kinds() == []


# -- standing still --------------------------------------------------------------------------------------------------


def test_a_rank_that_is_stopped() -> None:
    run = started()
    run.train(30)
    run.stand(12, {0: "reduce", 1: "reduce", 2: "backward"})
    finding = only(run)
    assert (finding["kind"], finding["ranks"], finding["stops"]) == ("silent-rank", [3], True)
    assert "Rank 3 on node2 has given no sign of life for 12 s" in finding["text"]
    assert "3 ranks wait for it in backward and reduce." in finding["text"]
    assert "kill -CONT 5003" in finding["fix"]
    assert run.snapshot()["state"] == "stuck"
    run.view.note_process(3, "stopped")
    assert "its process (5003) is stopped by a signal (SIGSTOP)." in only(run)["text"]
    run.view.note_process(3, "")
    run.train(2)
    assert (run.kinds(), run.snapshot()["state"]) == ([], "running")


def test_the_lead_is_stopped() -> None:
    run = started()
    run.train(30)
    run.stand(12, {1: "reduce", 2: "reduce", 3: "reduce"})
    assert only(run)["ranks"] == [0]
    assert run.snapshot()["state"] == "stuck"


def test_all_are_stopped() -> None:
    run = started()
    run.train(30)
    run.now += 30
    assert only(run)["text"].startswith("No rank has written anything for 20 s")


def test_clocks_of_hosts_differ() -> None:
    run = started()
    for _ in range(30):
        run.train(1, silent=(2, 3))
        run.now -= 7  # node2's clock
        run.step -= 4
        run.train(0)
        run.now += 1
        run.train(0)
        for rank in (2, 3):
            run.add(Tick(run.step, ms=EVEN, steps=4), rank)
        run.now += 6
        run.step += 4
        assert "silent-rank" not in run.kinds()


@pytest.mark.parametrize("phase", ["data", "rest", "forward", "backward"])
def test_a_rank_that_stands_in_a_phase_while_others_wait(phase: str) -> None:
    run = started()
    run.train(30)
    run.stand(14, {**ALL_STAND, 3: phase})
    finding = only(run)
    assert (finding["kind"], finding["ranks"], finding["stops"]) == ("standing-rank", [3], True)
    assert f"for 14 s, at {phase}.py:7. 3 ranks wait for it in reduce." in finding["text"]


@pytest.mark.parametrize("wait", ["forward", "backward", "step", "rest"])
@pytest.mark.parametrize("phase", ["forward", "backward", "rest", "checkpoint"])
def test_who_waits_inside_of_a_collective_does_not_stand(phase: str, wait: str) -> None:
    run = started()
    run.train(30)
    run.stand(14, {**dict.fromkeys(range(4), wait), 2: phase}, waits=(0, 1, 3))
    finding = only(run)
    # One rank may well evaluate or save alone while the others wait for it in a barrier.
    stops = wait != "rest" or phase not in ("rest", "checkpoint")
    kind = "standing-rank" if stops else "outside-step"
    assert (finding["kind"], finding["ranks"], finding["stops"]) == (kind, [2], stops)
    place = "outside of the training step" if wait == "rest" else f"in {wait}"
    assert f"for 14 s, at {phase}.py:7. 3 ranks wait for it {place}." in finding["text"]


def test_all_wait_inside_of_different_collectives() -> None:
    run = started()
    run.train(30)
    run.stand(14, {**ALL_STAND, 2: "forward"}, waits=(0, 1, 2, 3))
    assert only(run)["ranks"] == [2]


def test_a_rank_that_does_something_else() -> None:
    run = started()
    run.train(30)
    for _ in range(14):
        run.stand(1, {3: "rest"})
        run.now -= 1
    run.stand(14, {0: "reduce", 1: "reduce", 2: "reduce"})
    run.add(Tick(run.step, phase="rest", phase_s=0.2, ms={"rest": 900.0}), 3)
    finding = only(run)
    assert (finding["kind"], finding["ranks"]) == ("standing-rank", [3])
    assert finding["text"].startswith("Rank 3 on node2 does something else")


def test_all_stand_in_a_collective() -> None:
    run = started()
    run.train(30)
    run.stand(14, ALL_STAND, steps={2: run.step - 1})
    finding = only(run)
    assert (finding["ranks"], finding["stops"]) == ([2], True)
    assert "Rank 2 on node2 is a step behind" in finding["text"]


def test_a_long_evaluation_of_all_is_a_note() -> None:
    run = started()
    run.train(30)
    run.stand(60, dict.fromkeys(range(4), "rest"))
    assert (only(run)["level"], only(run)["stops"]) == ("note", False)
    assert run.snapshot()["state"] == "running"


def test_a_step_that_always_takes_long_is_no_finding() -> None:
    run = started()
    for _ in range(6):
        run.stand(30, dict.fromkeys(range(4), "forward"))
        run.now += 1
        run.step += 1
        for rank in range(4):
            run.add(Tick(run.step, steps=1, phase="forward", ms={"forward": 500.0, "backward": 500.0}), rank)
    run.stand(40, dict.fromkeys(range(4), "forward"))
    assert run.kinds() == []
    run.stand(160, {**ALL_STAND, 1: "forward"})
    assert run.kinds() == ["standing-rank"]


def test_ranks_that_have_not_begun() -> None:
    run = WatchedRun(4)
    run.now += 70
    assert only(run)["text"].startswith("No rank has written anything in 70 s")
    started_late = started(3)
    started_late.add(RoundStarted(procs=4), role="launcher")
    started_late.stand(70, dict.fromkeys(range(3), "rest"))
    finding = started_late.snapshot()["findings"][0]
    assert (finding["kind"], finding["ranks"]) == ("not-begun", [3])


# -- health ----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number() -> None:
    run = started()
    for value in (1.0, math.nan, math.nan, math.nan):
        run.train(1)
        run.add(ValuesLogged(run.step, {"train_loss": value, "f1": math.inf}))
    loss, other = run.snapshot()["findings"]
    assert (loss["level"], loss["text"]) == ("error", "`train_loss` has been nan since step 8.")
    assert (other["level"], other["text"]) == ("warning", "`f1` has been inf since step 4.")
    run.add(ValuesLogged(run.step, {"train_loss": 1.0, "f1": 0.5}))
    assert run.kinds() == []


def test_restarts_at_the_same_step() -> None:
    run = started()
    for restart in (1, 2):
        run.train(5)
        run.step = 0
        run.hello(restart)
        assert ("same-step" in run.kinds()) == (restart == 2)
    assert run.snapshot()["restart_steps"] == [20, 20]
    other = started()
    for restart in (1, 2):
        other.train(5 * restart)
        other.hello(restart)
    assert other.kinds() == []


def test_checkpoints_that_stall_and_fail() -> None:
    run = started()
    for stall_s in (3.0, 3.0, 3.0, 3.0):
        run.train(20)
        run.add(CheckpointSaved(run.step, "c", 10**9, stall_s, 3.0))
    assert only(run)["text"] == "Checkpoints stop the training for 3 s each, 15% of the time."
    run.add(CheckpointSaved(run.step, "c", None, 0.1, None, False, "the disk is full"))
    assert run.snapshot()["findings"][0]["text"].endswith("was not written: the disk is full")
    quick = started()
    for _ in range(4):
        quick.train(20)
        quick.add(CheckpointSaved(quick.step, "c", 10**9, 0.4, 3.0))
    assert quick.kinds() == []


def test_memory() -> None:
    run = started(memory_bytes=10 << 30)
    run.add(PlanMade(memory_bytes=2 << 30))  # without activations: that there is more says nothing
    run.train(20, memory=7 << 30, memory_peak=9 << 30)
    assert run.kinds() == []
    run.train(5, memory=7 << 30, memory_peak=9 << 30, ticks={2: {"memory_peak": int(9.6 * (1 << 30))}})
    assert (only(run)["kind"], only(run)["ranks"]) == ("memory-full", [2])


def test_memory_that_grows() -> None:
    growing, even = started(), started()
    for second in range(120):
        growing.train(1, memory=(1 << 30) + second * (8 << 20) + (second % 2) * (50 << 20))
        even.train(1, memory=(1 << 30) + min(second, 20) * (20 << 20) + (second % 7) * (50 << 20))
    assert growing.kinds() == ["memory-grows"]
    assert even.kinds() == []


def test_far_below_the_forecast() -> None:
    run = started()
    run.add(PlanMade(step_ms=100.0))
    run.train(30)
    assert only(run)["text"].startswith("A step takes 250 ms, 2.5 times what the plan's forecast said")
    near = started()
    near.add(PlanMade(step_ms=200.0))
    near.train(30)
    assert near.kinds() == []
