"""What each phase held."""

import os

import pytest
import torch

from paceline_lens.observe.memory import Memory, Resident


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


def test_a_fork_reads_of_itself_and_files_are_closed():
    resident = Resident()
    resident.read()
    child = os.fork()
    if child == 0:
        before, _ = resident.read()
        kept = b"x" * (64 * 2**20)
        os._exit(int(resident.read()[0] - before < len(kept) // 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    files = [each for each in (resident._status, resident._reset) if each >= 0]
    del resident
    for each in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
