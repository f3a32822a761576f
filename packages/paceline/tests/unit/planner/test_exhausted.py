"""Out of memory: what becomes of an allocator's error, and what does not."""

import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.resolve import draft, resolve
from paceline.planner.exhausted import explain_exhaustion
from paceline.planner.out_of_memory import OutOfMemory, is_out_of_memory

CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error code 12"


def situation(world_size=4, **settings):
    facts = (model_facts(nn.Linear(512, 512)),)
    return lambda: (
        resolve(draft(RunSettings.of(settings), [], world_size), facts, STRATEGIES),
        facts,
        True,
        world_size,
        world_size,
    )


@contextmanager
def explained(situation, where):
    try:
        yield
    except BaseException as error:
        explain_exhaustion(error, where, situation)
        raise


@pytest.mark.parametrize("error", [RuntimeError(CPU), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_it_says_what_the_plan_needs_and_what_needs_less(error):
    with pytest.raises(OutOfMemory) as caught, explained(situation(), "backward"):
        raise error
    text = str(caught.value)
    assert caught.value.code == "out-of-memory" and "in the backward pass" in text
    assert "parameters 1.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB" in text
    assert "launch with `--shard 4 --zero 1`" in text
    assert isinstance(caught.value, torch.OutOfMemoryError) and is_out_of_memory(caught.value)


def test_one_process_is_told_to_become_more():
    with (
        pytest.raises(OutOfMemory, match=r"launch with `--procs 4 --shard 4 --zero 1`"),
        explained(situation(1), "step"),
    ):
        raise MemoryError


def test_other_errors_pass_and_one_error_is_told_once():
    with pytest.raises(RuntimeError, match=r"^shapes$"), explained(situation(), "forward"):
        raise RuntimeError("shapes")
    with (
        pytest.raises(OutOfMemory, match="forward pass"),
        explained(situation(), "step"),
        explained(situation(), "forward"),
    ):
        raise MemoryError


def test_it_travels():
    with pytest.raises(OutOfMemory) as caught, explained(situation(), "step"):
        raise MemoryError
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is OutOfMemory and str(again) == str(caught.value)
