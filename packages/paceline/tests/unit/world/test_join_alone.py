"""Joining without peers: what needs no second process."""

import pytest
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.testing import worlds
from paceline.world import rendezvous
from paceline.world.roll_call import compare
from paceline.world.world import World


@pytest.fixture(autouse=True)
def left():
    yield
    rendezvous.leave()


def test_alone_needs_no_group() -> None:
    world = rendezvous.join(World(), cpu=True)
    assert world.device == "cpu"
    assert not dist.is_initialized()
    rendezvous.leave()
    rendezvous.leave()


def test_a_launched_process_gets_a_group_of_one() -> None:
    world = rendezvous.join(World(source="torchrun", address="127.0.0.1", port=1), cpu=True)
    assert (world.size, dist.get_rank(), dist.get_world_size()) == (1, 0, 1)
    again = rendezvous.join(World(source="torchrun", address="127.0.0.1", port=1), cpu=True)
    assert again == world
    rendezvous.leave()
    assert not dist.is_initialized()
    rendezvous.join(World(source="torchrun", address="127.0.0.1", port=1), cpu=True)
    assert dist.is_initialized()


def test_a_group_of_the_users_is_used_and_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = rendezvous.join(World(), cpu=True)
        assert (world.rank, world.size, world.source) == (0, 1, "torch.distributed")
        rendezvous.leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_of_another_size_is_an_error() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match="rank 1 of 2") as caught:
            rendezvous.join(worlds(2)[1], cpu=True)
        assert caught.value.code == "group-mismatch"
    finally:
        dist.destroy_process_group()


def test_several_processes_need_an_address() -> None:
    with pytest.raises(WorldError, match="the address at which they meet is not known") as caught:
        rendezvous.join(worlds(2)[0], cpu=True, timeout_s=1)
    assert caught.value.code == "rendezvous-address"
    with pytest.raises(WorldError, match="the port at which they meet is not known"):
        rendezvous.join(World(size=2, source="mpi", address="127.0.0.1"), cpu=True, timeout_s=1)
    assert not dist.is_initialized()


def test_an_unknown_backend() -> None:
    with pytest.raises(WorldError, match="backend-missing"):
        rendezvous.join(World(size=2, source="torchrun", address="127.0.0.1", port=1), cpu=True, backend="gluu")


def test_timeout_of_code_then_environment_then_default() -> None:
    assert rendezvous.timeout() == 600
    with environment.patched({"PACELINE_TIMEOUT_S": "7.5"}):
        assert rendezvous.timeout() == 7.5
        assert rendezvous.timeout(3) == 3


def entry(**changes):
    return {"size": 4, "host": "a", "device": "cuda", "backend": "cpu:gloo,cuda:nccl", "identity": ""} | changes


def test_what_ranks_bring_is_compared_all_at_once() -> None:
    assert compare({0: entry(identity="x"), 1: entry(identity="y"), 2: entry(host="b", identity="x")}) == []
    problems = compare(
        {0: entry(identity="x"), 1: entry(identity="x"), 2: entry(size=3), 3: entry(device="cpu", backend="gloo")}
    )
    assert [problem.code for problem in problems] == ["group-mismatch", "device-mixed", "device-shared"]
    assert "rank 2: 3" in problems[0].why
    assert "rank 3 on a: cpu (gloo)" in problems[1].why
    assert problems[2].what == "ranks 0, 1 share one device."


def test_gloo_lets_processes_share_a_device() -> None:
    assert compare({0: entry(backend="gloo", identity="x"), 1: entry(backend="gloo", identity="x")}) == []
