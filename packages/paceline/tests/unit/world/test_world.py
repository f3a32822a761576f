"""World: who am I."""

import dataclasses

import pytest

from paceline.testing import worlds
from paceline.world.world import DETECTORS, SIGNS, World


def test_alone_is_first_and_last() -> None:
    world = World()
    assert (world.is_main, world.is_last) == (True, True)
    assert world.source == "single"
    assert world.device == ""


def test_flags_by_rank() -> None:
    flags = [(one.is_main, one.is_last) for one in worlds(4, local_size=2)]
    assert flags == [(True, False), (False, False), (False, False), (False, True)]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1  # type: ignore[misc]


def test_nothing_in_the_environment_is_a_world_of_one() -> None:
    assert World.detect({}) == World()


def test_torchrun_is_believed_first() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
    world = World.detect(env)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.address, world.port) == ("node0", 29500)


class Asked(dict):
    """An empty environment that notes which variables are looked for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __contains__(self, name):
        self.names.add(name)
        return False

    def get(self, name, default=None):
        return default


def test_the_signs_of_a_detector_are_the_variables_that_it_looks_for():
    for name, signs in SIGNS.items():
        env = Asked()
        assert DETECTORS.get(name)(env) is None
        assert env.names == set(signs), name
