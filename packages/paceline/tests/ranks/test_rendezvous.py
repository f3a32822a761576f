"""Processes meet or fail with the reason: restarts, missing ranks, wrong addresses, groups that the script made."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm_python import executable, python3

from paceline import Accelerator
from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.testing import RankFailed, run_ranks
from paceline.world import device as devices
from paceline.world import meeting, rendezvous
from paceline.world.world import World


def launched(**changes) -> World:
    """The world as the launcher's environment tells it."""
    read = environment.get
    world = World(
        rank=read("RANK"),
        size=read("WORLD_SIZE"),
        local_rank=read("LOCAL_RANK"),
        local_size=read("LOCAL_WORLD_SIZE"),
        source="torchrun",
        address=read("MASTER_ADDR"),
        port=read("MASTER_PORT"),
    )
    return replace(world, **changes)


def total() -> float:
    """A collective over all ranks: 1 + 2 + ..."""
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()


def failure(world: World, **options) -> tuple[str, str]:
    with pytest.raises(WorldError) as caught:
        rendezvous.join(world, cpu=True, **options)
    assert not dist.is_initialized()
    return caught.value.code, str(caught.value)


def test_joining_leaving_and_joining_again() -> None:
    def work():
        found = []
        for _ in range(3):
            world = rendezvous.join(launched(), cpu=True, timeout_s=20)
            assert world.device == "cpu"
            assert rendezvous.join(launched(), cpu=True) == world  # a second Accelerator
            found.append(total())
            rendezvous.leave()
        return found

    assert run_ranks(work, 3, group=False) == [[6.0] * 3] * 3


def test_a_rank_that_is_through_waits_for_one_that_still_connects() -> None:
    """It would close connections that the other one is still making."""
    initialise = meeting.initialise

    def join_and_leave() -> tuple[float, float]:
        connected = 0.0

        def connect_slowly(*args: object) -> None:
            nonlocal connected
            initialise(*args)
            time.sleep(0.3)
            connected = time.monotonic()

        if environment.get("RANK") == 0:
            meeting.initialise = connect_slowly
        rendezvous.join(launched(), cpu=True, timeout_s=20)
        rendezvous.leave()
        return connected, time.monotonic()

    (connected, _), (_, left) = run_ranks(join_and_leave, world=2, group=False)
    assert left >= connected


def test_the_detected_world_joins() -> None:
    def work():
        world = rendezvous.join(World.detect(), cpu=True, timeout_s=20)
        return world.rank, world.size, total()

    assert run_ranks(work, 2, group=False) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_rank_that_never_comes_is_named() -> None:
    def work():
        return None if environment.get("RANK") == 2 else failure(launched(), timeout_s=1)

    started = time.monotonic()
    first, second, _ = run_ranks(work, 3, group=False)
    assert time.monotonic() - started < 10
    assert first[0] == second[0] == "rendezvous-missing"
    assert "1 did not arrive within 1 s: rank 2" in first[1]


def test_without_rank_0_the_address_is_named() -> None:
    def work():
        return None if environment.get("RANK") == 0 else failure(launched(), timeout_s=1)

    code, text = run_ranks(work, 2, group=False)[1]
    assert code == "rendezvous-unreachable" and "could not reach rank 0 at 127.0.0.1:" in text


def listens_at() -> set[str]:
    """The addresses and ports at which this process listens, as /proc writes them."""
    folder = Path("/proc/self")
    sockets = {os.readlink(each) for each in (folder / "fd").iterdir() if each.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {row[1] for row in listening}


def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    def work():
        before = listens_at()
        rendezvous.join(launched(), cpu=True)
        assert total() == 3.0
        addresses = {address.partition(":")[0] for address in listens_at() - before}
        return addresses, environment.snapshot()["GLOO_SOCKET_IFNAME"]

    for addresses, card in run_ranks(work, 2, group=False):
        assert (addresses, card) == ({"0100007F"}, "lo")  # 127.0.0.1; 0 and 32 times 0 are all interfaces


def test_an_address_that_does_not_exist() -> None:
    def work():
        return failure(launched(rank=1, size=2, address="no-such-host.invalid", port=1), timeout_s=1)

    code, text = run_ranks(work, 1, group=False)[0]
    assert code == "rendezvous-unreachable" and "cannot resolve 'no-such-host.invalid'" in text


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, text = run_ranks(lambda: failure(launched(size=2, port=port), timeout_s=2), 1, group=False)[0]
    assert code == "rendezvous-port" and f"cannot listen at 127.0.0.1:{port}" in text


def test_a_network_card_that_does_not_exist() -> None:
    def work():
        return failure(launched(), timeout_s=5)

    first, second = run_ranks(work, 2, group=False, env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert first[0] == "rendezvous-group" and "nosuch0" in first[1]
    assert second[0] in ("rendezvous-group", "rendezvous-unreachable")  # rank 0 may be gone already


def test_ranks_on_different_devices_all_hear_why() -> None:
    def work():
        if environment.get("RANK") == 1:
            devices.default_backend = lambda *_: "cpu:gloo,cuda:nccl"
        return failure(launched(), timeout_s=20)

    found = run_ranks(work, 2, group=False)
    assert found[0] == found[1]
    assert found[0][0] == "device-mixed" and "cpu (cpu:gloo,cuda:nccl)" in found[0][1]


def test_sizes_that_disagree() -> None:
    def work():
        world = launched()
        return failure(replace(world, size=3) if world.rank == 1 else world, timeout_s=20)

    found = run_ranks(work, 2, group=False)
    assert found[0] == found[1]
    assert found[0][0] == "group-mismatch" and "rank 0: 2, rank 1: 3" in found[0][1]


_AGENT = """
import sys
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def agents_port(tmp_path: Path) -> Iterator[int]:
    """The port of a store in a process of its own. Ranks are forks of this process, where its thread may hold a lock then."""
    script = tmp_path / "agent.py"
    script.write_text(_AGENT)
    command = [executable(), str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        yield int(agent.stdout.readline())
        agent.communicate()


@pytest.mark.timeout(400)
def test_a_restart_over_the_agents_store(agents_port: int) -> None:
    """The store survives with all that dead processes left in it, as torchelastic's does."""
    # Nothing waits for these seconds: on a busy machine the first processes took 58 s, of which most was imports. The default
    # of `run_ranks` is 60 s: a rank that was late by itself looked like one that hangs, and the others waited for it.
    limit_s = 120
    env = {"MASTER_PORT": str(agents_port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def dies_in_use():
        rendezvous.join(launched(), cpu=True, timeout_s=limit_s)
        if environment.get("RANK") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total()

    def dies_at_the_roll_call():
        if environment.get("RANK") == 0:
            time.sleep(60)
        rendezvous.join(launched(), cpu=True, timeout_s=limit_s)

    def works():
        rendezvous.join(launched(), cpu=True, timeout_s=limit_s)
        return total()

    with pytest.raises(RankFailed, match="rank 1 of 3 died"):
        run_ranks(dies_in_use, 3, group=False, env=env, timeout_s=limit_s)
    assert run_ranks(works, 3, group=False, env=env, timeout_s=limit_s) == [6.0] * 3
    with pytest.raises(RankFailed, match="did not end"):
        run_ranks(dies_at_the_roll_call, 3, group=False, env=env, timeout_s=0.5)
    assert run_ranks(works, 3, group=False, env=env, timeout_s=limit_s) == [6.0] * 3


def test_a_group_that_the_script_made_is_used() -> None:
    def work():
        world = launched()
        store = dist.TCPStore(world.address, world.port, 2, world.is_main, timeout=timedelta(seconds=20))
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
        same = rendezvous.join(world, cpu=True)
        found = rendezvous.join(World(), cpu=True)  # as where no launcher set anything
        rendezvous.leave()
        assert dist.is_initialized()
        value = total()
        dist.destroy_process_group()
        return same.rank, found.rank, found.size, found.source, value

    assert run_ranks(work, 2, group=False) == [(r, r, 2, "torch.distributed", 3.0) for r in range(2)]


def test_the_groups_timeout_is_the_users() -> None:
    def work():
        rendezvous.join(launched(), cpu=True)
        if environment.get("RANK") == 0:
            time.sleep(2)
            return None
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|closed"):
            total()
        return True

    assert run_ranks(work, 2, group=False, env={"PACELINE_TIMEOUT_S": "1"}) == [None, True]


CHILD = "from paceline import Accelerator; print('processes:', Accelerator(cpu=True).num_processes)"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PACELINE_SETTINGS": ""}


def construct(then) -> None:
    try:
        Accelerator(cpu=True)
    except WorldError as error:
        then.put(error.code)
    else:
        then.put("none")


def test_a_process_that_a_rank_has_started_is_not_that_rank():
    def work() -> list[str]:
        accelerator = Accelerator(cpu=True)
        children = [
            subprocess.Popen([python, "-c", CHILD], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            # The first one is found by its parents: a fork of another process has none of them.
            for python, env in ((sys.executable, dict(os.environ)), (python3(), {**os.environ, **ALONE}))
        ]
        inherited, alone = [child.communicate(timeout=120) for child in children]
        accelerator.wait_for_everyone()
        fork = multiprocessing.get_context("fork")
        codes = fork.SimpleQueue()
        child = fork.Process(target=construct, args=(codes,))
        child.start()
        child.join(60)
        return ["[world-child]" in inherited[1], alone[0].strip(), codes.get()]

    assert run_ranks(work, 2, group=False, timeout_s=200) == [[True, "processes: 1", "world-child"]] * 2
