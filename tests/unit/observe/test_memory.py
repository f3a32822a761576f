"""What each phase held."""

import torch

from paceline.observe.memory import Memory, Resident


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
    resident = Resident()
    now, peak = resident.read()
    assert 0 < now <= peak
