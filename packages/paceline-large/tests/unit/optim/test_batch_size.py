"""`find_executable_batch_size`: what counts as out of memory, and how it ends."""

from __future__ import annotations

import pytest
import torch

from paceline.base.errors import ConfigError, TrainError
from paceline_large.optim.batch_size import find_executable_batch_size


def needs(limit, error):
    tried = []

    def train(batch_size, factor=1):
        tried.append(batch_size)
        if batch_size > limit:
            raise error
        return batch_size * factor

    return train, tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_it_halves_until_memory_suffices(error):
    train, tried = needs(40, error)
    assert find_executable_batch_size(train)(factor=2) == 64
    assert tried == [128, 64, 32]


def test_the_cpus_own_error_counts():
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        if batch_size > 1:
            torch.empty(2**50, dtype=torch.uint8)
        return batch_size

    assert train() == 1


def test_each_call_begins_anew():
    train, tried = needs(1, MemoryError())
    search = find_executable_batch_size(train, starting_batch_size=2)
    assert (search(), search()) == (1, 1)
    assert tried == [2, 1, 2, 1]


def test_other_errors_pass_through_at_once():
    train, tried = needs(0, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        find_executable_batch_size(train)()
    assert tried == [128]


def test_where_even_one_sample_does_not_fit():
    train, _ = needs(0, MemoryError("no room"))
    with pytest.raises(TrainError, match=r"from 8 down to 1(.|\n)*no room") as caught:
        find_executable_batch_size(train, starting_batch_size=8)()
    assert caught.value.code == "batch-size-zero"


@pytest.mark.parametrize("start", [0, -1, 2.5, True])
def test_a_start_that_is_no_count(start):
    with pytest.raises(ConfigError) as caught:
        find_executable_batch_size(lambda batch_size: None, starting_batch_size=start)
    assert caught.value.code == "batch-size-start"


def test_a_function_without_a_batch_size():
    with pytest.raises(ConfigError, match=r"def train\(batch_size\)") as caught:

        @find_executable_batch_size
        def train():
            pass

    assert caught.value.code == "batch-size-function"
