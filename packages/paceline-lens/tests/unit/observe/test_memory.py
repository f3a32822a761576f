"""What each phase held."""

import os

import torch

from paceline_lens.observe.memory import Memory, begin_peak, resident


def test_the_phase_that_held_most_is_the_one_that_shows_it():
    memory = Memory(torch.device("cpu"), lambda: {"parameters": 2**20, "gradients": 0})
    memory.to("forward")
    kept = bytearray(64 * 2**20)
    kept[::4096] = b"x" * len(kept[::4096])
    memory.to("backward")
    del kept
    memory.to("step")
    memory.ended()
    assert memory.phases["forward"].process_peak - memory.base >= 60 * 2**20
    assert memory.peak >= 60 * 2**20 and len(memory.steps) == 1
    assert "parameters 1.00 MiB" in memory.text() and memory.to_dict()["peak"] == memory.peak


def test_the_peak_begins_anew_where_the_system_keeps_one():
    kept = bytearray(64 * 2**20)
    kept[::4096] = b"x" * len(kept[::4096])
    before = resident()
    del kept
    begin_peak()
    now, peak = resident()
    assert 0 < now <= peak
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert peak <= before[1] - 60 * 2**20


def test_a_fork_reads_of_itself():
    child = os.fork()
    if child == 0:
        before, _ = resident()
        kept = b"x" * (64 * 2**20)
        os._exit(int(resident()[0] - before < len(kept) // 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
