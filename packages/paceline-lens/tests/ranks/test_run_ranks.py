"""`run_ranks` itself: values come back, the first failure is told, and nothing outlives it."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks as run_shared_ranks

from paceline import Accelerator
from paceline.base import env as environment
from paceline.testing import Fault, InjectedFault, RankFailed, run_ranks


def test_values_in_rank_order_from_closures_with_arguments() -> None:
    offset = 10
    assert run_ranks(lambda scale: dist.get_rank() * scale + offset, 3, args=(2,)) == [10, 12, 14]


def test_a_warm_start_is_fast() -> None:
    run_ranks(lambda: None, 1)
    started = time.monotonic()
    run_ranks(lambda: dist.all_reduce(torch.ones(1)), 4)
    assert time.monotonic() - started < 5  # 0.06 s where nothing else runs


def test_the_environment_is_a_launchers() -> None:
    def work():
        return environment.get("RANK"), environment.get("WORLD_SIZE"), os.environ["COLOUR"], torch.get_num_threads()

    assert run_ranks(work, 2, env={"COLOUR": "red"}) == [(0, 2, "red", 1), (1, 2, "red", 1)]
    assert "COLOUR" not in os.environ and "RANK" not in os.environ


def test_a_function_may_end_one_training_and_begin_another() -> None:
    def work() -> list[float]:
        totals = []
        for value in (1.0, 2.0):
            accelerator = Accelerator(cpu=True)
            totals.append(accelerator.reduce(torch.tensor([value]), "sum").item())
            accelerator.end_training()
        return totals

    assert run_ranks(work, 2) == [[2.0, 4.0]] * 2


def test_large_values_and_tensors_come_back() -> None:
    assert [value.sum().item() for value in run_ranks(lambda: torch.ones(500_000), 2)] == [500_000] * 2


def test_backward_in_the_parent_first() -> None:
    def train() -> float:
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad.sum().item()

    here = train()
    assert run_ranks(train, 2) == [here, here]


def test_a_store_in_the_parents_garbage_is_not_freed_in_a_rank() -> None:
    gc.disable()
    try:
        ring: list[object] = [dist.TCPStore("127.0.0.1", 0, is_master=True)]  # its threads are not in the fork
        ring.append(ring)
        del ring
        assert run_ranks(lambda: (gc.collect(), dist.get_rank())[1], 2) == [0, 1]
    finally:
        gc.enable()


def test_output_is_collected_by_rank(capfd) -> None:
    printed: list[str] = []
    run_ranks(lambda: print("from", dist.get_rank()), 2, output=printed)
    assert printed == ["from 0\n", "from 1\n"]
    run_ranks(lambda: os.write(1, b"raw\n"), 1)
    assert capfd.readouterr().out == "raw\n"


def test_the_first_failing_rank_is_told_with_its_own_error() -> None:
    def work():
        dist.barrier()
        Fault("raise", rank=2, step=0).at(0)
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 2 of 4 failed: InjectedFault: rank 2 fails at step 0") as caught:
        run_ranks(work, 4)
    assert isinstance(caught.value.__cause__, InjectedFault)
    assert caught.value.rank == 2 and "in work" in str(caught.value)


def test_a_rank_that_dies() -> None:
    def work():
        print("before", flush=True)
        Fault("kill", rank=1, step=0).at(0)
        dist.barrier()

    with pytest.raises(RankFailed, match=r"rank 1 of 2 died: killed by SIGKILL\n\n--- printed by rank 1\nbefore"):
        run_ranks(work, 2)
    with pytest.raises(RankFailed, match="rank 0 of 1 died: ended with code 3 before it returned"):
        run_ranks(lambda: Fault("exit", rank=0, step=0).at(0), 1)


def test_a_hang_ends_with_the_stacks_of_all() -> None:
    def work():
        if dist.get_rank() == 1:
            wait_for_nothing()
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"hanging: rank 0, 1\)") as caught:
        run_ranks(work, 2, timeout_s=1)
    assert time.monotonic() - started < 10
    assert "in wait_for_nothing" in str(caught.value) and "in barrier" in str(caught.value)


def wait_for_nothing() -> None:
    threading.Event().wait(60)


def test_what_cannot_be_pickled() -> None:
    class Odd(Exception):
        def __init__(self, one, two) -> None:
            super().__init__("odd")

    def fail():
        raise Odd(1, 2)

    with pytest.raises(RankFailed, match="odd") as caught:
        run_ranks(fail, 1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed: .*pickle"):
        run_ranks(lambda: lambda: 1, 1)


def test_no_process_outlives_it() -> None:
    def work():
        if dist.get_rank() == 0:
            raise ValueError(os.getpid())
        time.sleep(60)

    pids: list[str] = []

    def both():
        print(os.getpid(), flush=True)
        work()

    with pytest.raises(RankFailed):
        run_ranks(both, 3, output=pids)
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_stopped_rank_is_ended_too() -> None:
    with pytest.raises(RankFailed, match="did not end within"):
        run_ranks(lambda: Fault("stop", rank=0, step=0).at(0), 1, timeout_s=0.5)


def test_workers_of_a_loader_inside() -> None:
    def work():
        data = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1, persistent_workers=True)
        return [batch.tolist() for batch in data]

    assert run_ranks(work, 2) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_shared_ranks_stay_for_the_next_case_and_form_a_group_of_its_own() -> None:
    def work():
        os.environ["COLOUR"] = "red"
        torch.set_default_dtype(torch.float64)
        dist.new_group([0])
        return os.getpid(), len(os.listdir("/proc/self/task"))

    found = run_shared_ranks(work, 2)
    assert run_shared_ranks(work, 2) == found
    assert (
        run_shared_ranks(lambda: (os.environ.get("COLOUR"), torch.get_default_dtype()), 2)
        == [(None, torch.float32)] * 2
    )


def test_a_case_that_fails_in_shared_ranks_runs_again_in_fresh_ones() -> None:
    def leaves() -> None:
        assert not hasattr(environment, "_left")
        environment._left = True

    def fails() -> None:
        raise ValueError(str(dist.get_rank()))

    run_shared_ranks(leaves, 2)
    with pytest.raises(pytest.fail.Exception, match="behind other cases"):
        run_shared_ranks(leaves, 2)
    with pytest.raises(RankFailed, match="ValueError"):
        run_shared_ranks(fails, 2)
    run_shared_ranks(leaves, 2)
