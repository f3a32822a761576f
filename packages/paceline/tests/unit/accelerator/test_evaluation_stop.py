"""`EvaluationAgreement`: ranks that are not at one batch, or wait for each other in it, stop after the same one."""

import random
import threading
import time

import pytest
import torch.distributed as dist

from paceline.run import evaluation_stop
from paceline.run.evaluation_stop import EvaluationAgreement

RANKS, BATCHES = 3, 4000


def play(seed: int, *, lockstep: bool, asked: dict[int, int], absent: bool = False) -> list[int]:
    """The batch after which each rank stops; 0 for one that came to the end of its evaluation.

    Args:
        seed: of how long batches take.
        lockstep: whether each batch has a collective operation, in which ranks wait for each other.
        asked: rank -> the batch in which it is asked to end.
        absent: whether rank 2 takes no part in the evaluation.
    """
    store, together = dist.HashStore(), threading.Barrier(RANKS)
    stopped = [0] * RANKS

    def evaluate(rank: int) -> None:
        agreement, chance = EvaluationAgreement(store, rank, RANKS), random.Random(seed * RANKS + rank)
        slowness = chance.choice([0.0, 1e-4, 1e-3])
        for batch in range(1, BATCHES if not absent else 50):
            if lockstep:
                together.wait(20)
            time.sleep(slowness * chance.random())
            if agreement.reached(7, batch, asked.get(rank, BATCHES) <= batch):
                stopped[rank] = batch
                return

    threads = [threading.Thread(target=evaluate, args=(rank,)) for rank in range(RANKS - absent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "ranks wait for each other for ever"
    return stopped


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    for name, seconds in (("_LOOK_S", 0.002), ("_FIRST_WAIT_S", 0.005), ("_ABSENT_S", 0.05)):
        monkeypatch.setattr(evaluation_stop, name, seconds)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("asked", [{0: 3}, {1: 5, 2: 2}, {0: 1, 1: 1, 2: 1}], ids=str)
def test_all_stop_after_the_same_batch(lockstep, asked):
    for seed in range(6):
        stopped = play(seed, lockstep=lockstep, asked=asked)
        assert len(set(stopped)) == 1 and stopped[0] >= min(asked.values()), (seed, stopped)


def test_nobody_stops_where_nobody_is_asked():
    assert play(0, lockstep=False, asked={}, absent=True) == [0, 0, 0]


def test_a_rank_that_takes_no_part_is_waited_for_only_so_long():
    assert play(0, lockstep=False, asked={0: 1}, absent=True) == [0, 0, 0]
