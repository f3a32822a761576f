"""Debug mode: what would hang is an error on every rank, which names the call sites, within the timeout."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from warm_python import executable

from paceline import Accelerator
from paceline.base.errors import CollectiveError
from paceline.testing import RankFailed, run_ranks
from paceline.world import rendezvous
from paceline.world.collectives import Collectives
from paceline.world.world import World
from paceline_lens.hangs import debug

TIMEOUT_S = 0.7


def watched(timeout_s: float = TIMEOUT_S) -> Collectives:
    world = World(dist.get_rank(), dist.get_world_size(), source="test")
    return Collectives(world, device=torch.device("cpu"), debug=True, timeout_s=timeout_s)


def outcome(loop: Callable[[Collectives], Any], timeout_s: float = TIMEOUT_S) -> Callable[[], tuple[str, str]]:
    """A rank's work: the code and text of the error of `loop`, whatever it was doing when it came."""

    def work() -> tuple[str, str]:
        ours = watched(timeout_s)
        try:
            loop(ours)
        except CollectiveError as error:
            return error.code, str(error)
        return "", ""

    return work


@pytest.mark.parametrize("size", [2, 3])
def test_wait_for_everyone_on_the_main_process_only(size: int) -> None:
    """Document 001: after an epoch the main process alone waits; the others are in the next epoch's backward."""

    def work():
        accelerator = Accelerator(debug=True, timeout_s=5)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        with pytest.raises(CollectiveError) as caught:
            for _epoch in range(2):
                accelerator.backward(model(torch.ones(3, 4)).mean())
                optimizer.step()
                if accelerator.is_main_process:
                    accelerator.wait_for_everyone()
        return caught.value.code, str(caught.value)

    started = time.monotonic()
    found = run_ranks(work, size)
    assert time.monotonic() - started < 20
    assert len(set(found)) == 1
    code, text = found[0]
    assert code == "collective-diverged"
    others = ", ".join(map(str, range(1, size)))
    assert "rank 0: wait_for_everyone at " in text and "accelerator.wait_for_everyone()" in text
    assert f"rank {others}: backward at " in text and "accelerator.backward(" in text
    assert text.count("test_hangs.py:") == 2


@pytest.mark.parametrize("size", [2, 3])
def test_the_others_end_while_the_main_process_waits(size: int) -> None:
    def loop(ours: Collectives) -> None:
        ours.barrier()
        if ours.rank == 0:
            ours.barrier()

    started = time.monotonic()
    found = run_ranks(outcome(loop, timeout_s=60), size)
    assert time.monotonic() - started < 20, "an exit is seen at once, not at the timeout"
    code, text = found[0]
    assert code == "collective-missing"
    # It need not wait for the others once one has ended.
    assert any(f"rank {rank} has ended, or left; it was last seen in" in text for rank in range(1, size))
    assert [one[0] for one in found[1:]] == [""] * (size - 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_sleeps_is_named_and_woken(late: int) -> None:
    def loop(ours: Collectives) -> None:
        ours.barrier()
        if ours.rank == late:
            time.sleep(50)
        ours.gather(torch.ones(2))

    started = time.monotonic()
    found = run_ranks(outcome(loop), 3)
    assert time.monotonic() - started < 15
    assert {code for code, _ in found} == {"collective-missing"}
    assert all(f"rank {late} never entered gather" in text for _, text in found)
    assert all(f"rank {late} did not come within 0.7 s; it was last seen in wait_for_everyone" in t for _, t in found)


def test_a_rank_that_is_late_for_the_error_gets_it_too() -> None:
    def loop(ours: Collectives) -> None:
        ours.barrier()
        if ours.rank == 1:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:  # Python that catches everything in between
                with contextlib.suppress(CollectiveError):
                    time.sleep(0.01)
            raise CollectiveError("seen", "the error came while it was busy")
        ours.barrier()

    first, second = run_ranks(outcome(loop), 2)
    assert first[0] == "collective-missing" and second[0] == "seen"


def test_a_rank_that_has_entered_nothing() -> None:
    def work():
        if dist.get_rank() == 1:
            time.sleep(2)
            return None
        return outcome(lambda ours: ours.barrier())()

    code, text = run_ranks(work, 2)[0]
    assert code == "collective-missing" and "it has not entered any operation" in text


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    def loop(ours: Collectives) -> None:
        ours.barrier()
        if ours.rank == 1:
            try:
                raise ValueError("a bad sample")
            except ValueError:
                rendezvous.leave()  # as at the end of a process that fails
                return
        ours.barrier()

    code, text = run_ranks(outcome(loop, timeout_s=60), 2)[0]
    assert code == "collective-missing" and "rank 1 has ended: ValueError: a bad sample" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda ours: ours.gather(torch.ones(2, 3 + ours.rank)),
        lambda ours: ours.gather(torch.ones(2).to([torch.float32, torch.int64][ours.rank])),
        lambda ours: ours.reduce(torch.ones(2 + ours.rank)),
        lambda ours: ours.check("backward", f"{ours.rank} losses"),
    ],
)
def test_other_shapes_or_dtypes_at_the_same_line(call) -> None:
    found = run_ranks(outcome(call, timeout_s=10), 2)
    assert found[0] == found[1]
    code, text = found[0]
    assert code == "collective-diverged" and "pass different data to" in text
    assert "rank 0:" in text and "rank 1:" in text and text.count("test_hangs.py:") == 2


def test_the_same_operation_from_other_lines() -> None:
    def loop(ours: Collectives) -> None:
        if ours.rank:
            ours.barrier()
        else:
            ours.barrier()

    found = run_ranks(outcome(loop, timeout_s=10), 2)
    assert found[0] == found[1] and found[0][0] == "collective-diverged"
    assert "not at the same place of the script" in found[0][1]


def test_ranks_that_agree_are_left_alone() -> None:
    def work():
        ours, other = watched(10), watched(10)
        for step in range(10):
            ours.gather(torch.ones(1 + ours.rank))
            other.reduce(torch.ones(2))
            ours.check("backward", str(step))
        time.sleep(0.3 * ours.rank)  # rank 0 ends first, and with it the store
        return ours.any(False)

    assert run_ranks(work, 3) == [False] * 3


def test_a_call_that_cannot_be_interrupted_ends_the_process_with_its_stack() -> None:
    def work():
        debug._GRACE_S = 0.3
        ours = watched()
        ours.barrier()
        if ours.rank == 1:
            dist.recv(torch.ones(1), src=0)  # which never sends, and lives on
        try:
            ours.barrier()
        except CollectiveError:
            time.sleep(5)

    with pytest.raises(RankFailed, match="rank 1 of 2 died: ended with code 1") as caught:
        run_ranks(work, 2)
    printed = caught.value.output[1]
    assert "rank 1 is in a call that cannot be interrupted, and ends here:" in printed
    assert "rank 1 never entered wait_for_everyone" in printed and "in recv" in printed


def test_off_costs_nothing() -> None:
    def work():
        import threading

        world = World(dist.get_rank(), dist.get_world_size(), source="test")
        ours = Collectives(world, device=torch.device("cpu"))
        ours.check("backward")
        return ours._exchange.call_check is None and threading.active_count() == 1

    assert run_ranks(work, 2) == [True, True]


@pytest.mark.slow
def test_a_script_that_ends_in_the_middle(tmp_path) -> None:
    """Real processes, ended by the interpreter: the marks are left at exit, and the error is printed once a rank."""
    script = tmp_path / "train.py"
    script.write_text(
        "from paceline import Accelerator\n"
        "accelerator = Accelerator(cpu=True, debug=True, timeout_s=30)\n"
        "accelerator.wait_for_everyone()\n"
        "if accelerator.is_main_process:\n"
        "    accelerator.wait_for_everyone()\n"
    )
    port = free_port()
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [executable(), str(script)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert time.monotonic() - started < 30
    assert [rank.returncode for rank in ranks] == [1, 0], said
    assert said[0].count("paceline.CollectiveError: rank 1 never entered wait_for_everyone.  [collective-missing]") == 1
    assert "train.py:5 in <module>: accelerator.wait_for_everyone()" in said[0]
    assert "it was last seen in wait_for_everyone at" in said[0] and "train.py:3" in said[0]
