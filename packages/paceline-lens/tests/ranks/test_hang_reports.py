"""Without debug mode: a wait is reported, a rank that left is named, and no rank waits for gradients that never come."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_models import GPT
from warm_python import executable

from paceline import Accelerator
from paceline.base.errors import CollectiveError
from paceline.testing import RankFailed, run_ranks
from paceline.world import leaving, rendezvous
from paceline.world.works import finish_threads
from paceline_lens.hangs.waits import WaitReports
from paceline_lens.hangs.watcher import duty

REPORT_S = 0.6
SETTINGS = {"PACELINE_HANG_REPORT_S": str(REPORT_S), "PACELINE_TIMEOUT_S": "40"}


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad gradient")


def log_to_stdout() -> None:
    """As Python does where nobody configured logging; pytest did."""
    logging.getLogger("paceline").addHandler(logging.StreamHandler(sys.stdout))


def sleep_until_reported() -> None:
    """Lets the others wait until they have asked this rank where it is, and a little longer."""
    reports = duty(WaitReports)
    assert reports is not None
    asked, until = reports.round, time.monotonic() + 30
    while reports.round == asked and time.monotonic() < until:
        time.sleep(REPORT_S / 10)
    time.sleep(2 * REPORT_S)


def prepared() -> tuple[Accelerator, Any]:
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def test_who_waits_where_is_reported_and_nothing_while_the_loop_goes_on() -> None:
    def work() -> None:
        log_to_stdout()
        accelerator, model = prepared()
        late = accelerator.process_index == 1
        for _ in range(10):  # a straggler: the others wait in each step, and no wait is long
            time.sleep(0.15 * late)
            accelerator.backward(model(torch.ones(3, 4)).mean())
        until = time.monotonic() + 2 * REPORT_S
        while time.monotonic() < until:  # everybody computes
            pass
        accelerator.wait_for_everyone()
        print(f"rank {accelerator.process_index} went on", flush=True)
        if late:
            sleep_until_reported()
        accelerator.gather(torch.ones(2))
        if late:
            sleep_until_reported()
        accelerator.backward(model(torch.ones(3, 4)).mean())
        if late:
            sleep_until_reported()
        # The main thread waits in the store, over the connection that it shares with no other thread.
        dist.new_group([0, 1, 2])

    printed: list[str] = []
    run_ranks(work, 3, env=SETTINGS, output=printed)
    assert all(text.startswith("rank") and "went on" in text.splitlines()[0] for text in printed), printed
    everything = "".join(printed)
    reports = [text for text in everything.split("rank ") if "not all ranks are in it" in text]
    assert 3 <= len(reports) <= 9, everything  # one a wait, and few more
    assert "2 ranks (0, 2): in gather at " in everything
    assert "accelerator.gather(torch.ones(2))" in everything and "test_hang_reports.py:" in everything
    assert "rank 1: at " in everything and "in sleep_until_reported: time.sleep(" in everything
    assert "2 ranks (0, 2): in backward at " in everything and "2 ranks (0, 2): in new_group at " in everything
    assert "fails after 40 s (--timeout-s)" in everything and "--debug" in everything


def test_a_rank_that_has_left_is_named_by_the_others(tmp_path: Path) -> None:
    def work() -> str:
        accelerator, model = prepared()
        if accelerator.process_index == 1:
            return ""
        try:
            if accelerator.process_index == 0:
                accelerator.save_state(tmp_path / "never")
            else:
                accelerator.backward(model(torch.ones(3, 4)).mean())
        except CollectiveError as error:
            return str(error)
        return ""

    save, _, backward = run_ranks(work, 3, env=SETTINGS)
    for operation, text in (("save_state", save), ("backward", backward)):
        assert f"{operation} failed, as rank 1 has left.  [collective-failed]" in text
        assert "rank 1 has left: it ended, or left the group, without an error; it was the first to leave" in text
        assert f"fix: let every rank call {operation}" in text
        assert "--debug" in text and "why: gloo says: " in text


def test_a_collective_that_ends_by_the_timeout_says_where_each_rank_was() -> None:
    def work() -> str:
        rendezvous.leave()  # the group of `run_ranks`, whose timeout is long
        accelerator = Accelerator(timeout_s=1)
        try:
            if accelerator.is_main_process:
                accelerator.gather(torch.ones(2))
            time.sleep(2.5 * (not accelerator.is_main_process))
        except CollectiveError as error:
            return str(error)
        return ""

    text, _ = run_ranks(work, 2, group=False, env={"PACELINE_HANG_REPORT_S": "0.3"})
    assert "gather did not end in time" in text and "timeout_s" in text and "--debug" in text
    assert "why: rank 0: in gather at" in text and "why: rank 1: at" in text


@pytest.mark.parametrize("zero", [0, 2])
def test_a_backward_pass_that_fails_on_one_rank_ends_the_others_before_the_timeout(zero: int) -> None:
    def work() -> None:
        accelerator = Accelerator(plan={"zero": zero, "shard": 2} if zero else None)
        model = torch.nn.Linear(4, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(3, 4))
        if accelerator.process_index == 1:
            with pytest.raises(ValueError, match="bad gradient"):
                accelerator.backward(FailsInBackward.apply(output).mean())
            time.sleep(30)  # it goes on, and not with this step
        accelerator.backward(output.mean())

    with pytest.raises(RankFailed, match="rank 0 of 2 died: ended with code 1") as caught:
        run_ranks(work, 2, env=SETTINGS, timeout_s=30)
    text = caught.value.output[0]
    assert "in backward at " in text and "accelerator.backward(output.mean())" in text
    assert "the backward pass of rank 1 failed: ValueError: bad gradient" in text


# A rank that leaves out the step and goes on: its next forward pass takes messages of the others' backward pass for its own.
GOES_ON = [({"tp": 2}, True)]
WAITS = [({"shard": 2}, False), ({"shard": 2, "zero": 3}, False), ({"shard": 2, "zero": 1}, False), ({"cp": 2}, False),
         ({"pp": 2}, False), ({"tp": 2}, False)]  # fmt: skip


@pytest.mark.needs("large")
@pytest.mark.parametrize(
    ("plan", "goes_on"), [*GOES_ON, *(pytest.param(*case, marks=pytest.mark.long) for case in WAITS)], ids=str
)
def test_a_rank_that_catches_the_error_of_its_backward_pass_is_named(plan: dict[str, int], goes_on: bool) -> None:
    def work() -> None:
        accelerator = Accelerator(plan=plan, cpu=True)
        model = GPT(layers=2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        tokens = torch.ones(2, 8, dtype=torch.long)
        fails = [accelerator.process_index == 1, False, False, False]

        def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            output = FailsInBackward.apply(output) if fails.pop(0) else output
            return output.square().mean()

        while fails:
            try:
                accelerator.forward_backward(model, (tokens, tokens), loss_of)
            except (ValueError, RuntimeError):  # a pipeline raises the latter from the former
                time.sleep(0 if goes_on else 30)

    with pytest.raises(RankFailed, match="rank 0 of 2 died: ended with code 1") as caught:
        run_ranks(work, 2, env=SETTINGS, timeout_s=30)
    text = caught.value.output[0]
    assert "rank 0 ends: it has waited for" in text and "the backward pass of rank 1 failed: " in text


def test_works_that_nobody_waited_for_are_finished_or_told() -> None:
    def work() -> tuple[bool, bool]:
        log_to_stdout()
        first = dist.get_rank() == 0
        leaving._UNFINISHED_S = 0.3
        time.sleep(0.5 * (not first))
        work = dist.all_reduce(torch.ones(100), async_op=True)
        early = finish_threads(0.1) if first else True
        done = finish_threads(20) and work.is_completed()
        if first:
            dist.all_reduce(torch.ones(100), async_op=True)  # the other never makes this call, and leaves later
        time.sleep(1.5 * (not first))
        rendezvous.leave()
        return early, done

    printed: list[str] = []
    assert run_ranks(work, 2, output=printed) == [(False, True), (True, True)]
    assert "rank 0 ends while a collective that its script began with async_op=True is not finished" in printed[0]
    assert not printed[1]


def launched(folder: Path, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
    (folder / "train.py").write_text(dedent(script))
    launch = ["-m", "paceline.cli.main", "launch", "--procs", "2", "--timeout-s", "30"]
    # Some variables are read by torch when it is imported: then an interpreter that has not imported it yet.
    command = [sys.executable if env else executable(), *launch, *words, "train.py"]
    return subprocess.run(
        command, cwd=folder, env={**plain, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("rank", "call"), [(0, "sys.exit(0)"), (1, "os._exit(0)")])
def test_the_launcher_names_the_rank_that_left_first_with_its_code(tmp_path: Path, rank: int, call: str) -> None:
    script = f"""
        import os, sys, torch
        from paceline import Accelerator
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(4, 2))
        accelerator.wait_for_everyone()
        if accelerator.process_index == {rank}:
            {call}
        accelerator.gather(torch.ones(2))
    """
    # torch crashes as DDP is made in this mode; it must not reach it.
    done = launched(tmp_path, script, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 1, done.stderr
    assert f"rank {rank} left with exit code 0 while rank {1 - rank} still waited for it.  [rank-failed]" in done.stderr
    assert "[collective-failed]" in done.stderr and "--debug" in done.stderr and "mend" not in done.stderr
    assert done.stderr.count("TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO") == 1


def test_a_work_that_ends_after_the_script_does_not_abort_the_process(tmp_path: Path) -> None:
    script = """
        import time, torch, torch.distributed as dist
        from paceline import Accelerator
        model = Accelerator(cpu=True).prepare(torch.nn.Linear(4, 2))  # which keeps the group, and so its threads
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        future.then(lambda _: time.sleep(0.7))  # in a thread of gloo's, which then needs the interpreter
    """
    done = launched(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")


def test_wait_all_waits_for_every_work_and_raises_the_first_error() -> None:
    from paceline.world.works import wait_all

    waited: list[str] = []

    def work(name: str, fails: bool) -> Any:
        class Work:
            def wait(self) -> None:
                waited.append(name)
                if fails:
                    raise RuntimeError(name)

        return Work()

    with pytest.raises(RuntimeError, match="second"):
        wait_all([work("first", False), work("second", True), work("third", True), work("fourth", False)])
    assert waited == ["first", "second", "third", "fourth"]
