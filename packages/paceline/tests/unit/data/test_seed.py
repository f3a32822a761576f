"""`set_seed`: the same numbers again, from every source."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from paceline.base import env
from paceline.base.errors import ConfigError
from paceline.data.seed import set_seed


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_every_source_repeats():
    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_a_seed_beyond_numpys_range():
    assert set_seed(2**40 + 1) == 2**40 + 1


def test_device_specific_adds_the_rank():
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    with env.patched(ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        assert set_seed(10, device_specific=True) == 13
        assert set_seed(10) == 10


def test_deterministic():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("seed", [True, np.int64(1)])
def test_numbers_of_other_classes_are_seeds(seed):
    assert set_seed(seed) == torch.initial_seed() == 1


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None, 2**63])
def test_what_cannot_be_a_seed(seed):
    with pytest.raises(ConfigError) as caught:
        set_seed(seed)
    assert caught.value.code == "seed-value"
