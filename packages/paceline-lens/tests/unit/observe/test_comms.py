"""Rates, means and tables of communication; what really happens on ranks is in `ranks/test_profiles.py`."""

import pytest
import torch

from paceline_lens.observe import tap
from paceline_lens.observe.clock import HostClock
from paceline_lens.observe.comms import Comms, bandwidth, trimmed_mean


class Ticks(HostClock):
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def test_bandwidths_are_those_of_the_formulas():
    gigabit = 10**9 // 8  # bytes that take a second at 1 Gbps
    assert bandwidth("all_reduce", gigabit, 1000, 4) == pytest.approx((2, 1.5))
    assert bandwidth("all_gather_into_tensor", gigabit, 1000, 4) == pytest.approx((4, 3))
    assert bandwidth("reduce_scatter_tensor", gigabit, 500, 4) == pytest.approx((8, 6))
    assert bandwidth("all_to_all_single", gigabit, 1000, 4) == pytest.approx((1, 0.75))
    assert bandwidth("send", gigabit, 1000, 2) == bandwidth("broadcast", gigabit, 1000, 2) == pytest.approx((1, 1))
    assert bandwidth("all_reduce", gigabit, 0, 2) == (0, 0)


def test_a_mean_leaves_out_the_extremes():
    assert trimmed_mean([100.0, *[2.0] * 8, 0.0]) == 2
    assert trimmed_mean([1.0, 3.0]) == 2
    assert trimmed_mean([]) == 0


def test_each_call_has_its_own_latency():
    clock = Ticks()
    comms = Comms(clock=clock, phase=lambda: "backward")
    for number in range(1, 4):
        done = comms.issued("all_reduce", 4096, 2, "cpu")
        clock.seconds += number / 1e3
        done()
    comms.issued("all_reduce", 4096, 2, "cpu")  # under way
    (one,) = comms.summary()
    # 1, 2 and 3 ms, and not 1, 3 and 6
    assert (one.count, one.total_ms, one.mean_ms) == (4, pytest.approx(6), pytest.approx(2))
    assert comms.by_phase() == pytest.approx({"backward": 6})
    assert comms.to_dict()["all_reduce"][4096]["count"] == 4
    assert "4.00 KiB" in comms.text()
    comms.reset()
    assert comms.summary() == []


def test_operations_are_chosen_and_told():
    told = []
    comms = Comms(ops=["broadcast"], verbose=True, tell=told.append, clock=Ticks())
    comms.issued("all_reduce", 8, 2, "cpu")()
    comms.issued("broadcast", 8, 2, "cpu")()
    assert [one.op for one in comms.summary()] == ["broadcast"]
    assert told == ["comms: broadcast 8 B among 2: 0.00 ms, algbw 0.00 Gbps, busbw 0.00 Gbps"]


def test_another_thread_may_issue_a_call_meanwhile():
    def phase():
        if calls:
            calls.pop()()
        return ""

    comms = Comms(phase=phase)
    calls = [lambda: comms.issued("all_reduce", 8, 2, "cpu")()]
    comms.issued("all_reduce", 8, 2, "cpu")()
    assert [one.count for one in comms.summary()] == [2]


def test_another_thread_may_read_latencies_meanwhile():
    class Clock(HostClock):
        def come(self, moment):
            return len(comms.summary()) == 1

    comms = Comms()
    comms._clock = Clock()
    comms.issued("all_reduce", 8, 2, "cuda")()
    comms._drain()
    assert [one.mean_ms > 0 for one in comms.summary()] == [True]


def test_calls_are_passed_through_only_while_somebody_listens():
    def passed():
        return torch._C._dispatch_dump("c10d::allreduce_")

    before = passed()
    first, second = Comms(), Comms()
    assert not tap.installed() and passed() == before
    first.start()
    second.start()
    assert tap.installed() and passed() != before
    first.stop()
    assert tap.installed()
    del second
    assert not tap.installed() and passed() == before
