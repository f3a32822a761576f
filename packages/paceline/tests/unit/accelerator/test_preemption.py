"""`EndAgreement`: whichever rank is asked, and however ranks run ahead of each other, all stop after the same step."""

import random

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import TrainError
from paceline.run import preemption
from paceline.run.preemption import LEAD, PACED, EndAgreement


def played(seed: int, ranks: int, lead: int, asked: dict[int, int], most: int = 400) -> list[int]:
    """Steps after which ranks stop, where `asked[rank]` is a step at which that one is asked, and order is left to chance."""
    store, chance = dist.HashStore(), random.Random(seed)
    agreements = [EndAgreement(store, rank, torch.device("cpu")) for rank in range(ranks)]
    at, stopped = [0] * ranks, [0] * ranks
    while not all(stopped) and max(at) < most:
        # The end of step n is reached only once all others have reached that of step n - lead.
        ready = [rank for rank in range(ranks) if not stopped[rank] and at[rank] < min(at) + lead]
        rank = chance.choice(ready)
        at[rank] += 1
        if agreements[rank].reached(asked.get(rank, most + 1) <= at[rank]):
            stopped[rank] = at[rank]
    return stopped


@pytest.mark.parametrize("every", [0.0, 3e-5, 1.0], ids=["each step", "some steps", "every 32nd step"])
def test_all_stop_after_the_same_step(monkeypatch, every):
    monkeypatch.setattr(preemption, "_LOOK_S", every)
    for seed in range(120):
        chance = random.Random(seed)
        asked = {chance.randrange(3): chance.randint(1, PACED * 3) for _ in range(chance.randint(1, 3))}
        stopped = played(seed, 3, chance.randint(1, LEAD), asked)
        first = min(asked.values())
        assert len(set(stopped)) == 1 and first <= stopped[0] <= first + 2 * LEAD + preemption._MOST_STEPS_IN_A_LOOK, (
            seed,
            stopped,
        )


def test_nobody_stops_where_nobody_is_asked():
    assert played(0, 2, 1, {}) == [0, 0]


def test_ranks_that_do_not_wait_for_each_other_say_so():
    store = dist.HashStore()
    slow, fast = (EndAgreement(store, rank, torch.device("cpu")) for rank in range(2))
    assert not any(fast.reached(False) for _ in range(8))
    assert not slow.reached(True)
    with pytest.raises(TrainError, match="preemption-apart"):
        fast.reached(False)


def test_a_look_comes_every_tenth_of_a_second(monkeypatch):
    """Steps that take 18 ms by the clock are looked at after every fifth one."""
    now = 0.0
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    store = dist.HashStore()
    agreement = EndAgreement(store, 0, torch.device("cpu"))
    for _ in range(PACED):
        now += 0.018
        assert not agreement.reached(False)
    assert store.get("every") == b"5"
