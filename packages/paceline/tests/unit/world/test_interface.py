"""Where the processes of a run listen: on as few addresses as will do."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.base import env as environment
from paceline.world.network import interface
from paceline.world.world import World


@pytest.mark.parametrize(
    ("address", "told", "local_size", "meets_at"),
    [
        ("127.0.0.1", "2", 2, "127.0.0.1"),
        ("localhost", "2", 2, "127.0.0.1"),
        ("localhost", None, 2, "localhost"),  # rank 0 of several hosts may be called so
        ("localhost", "1", 1, "localhost"),
        ("203.0.113.7", "2", 2, "203.0.113.7"),
        ("n" * 64, "2", 2, "n" * 64),  # longer than a part of a DNS name may be
    ],
)
def test_where_ranks_meet(address: str, told: str | None, local_size: int, meets_at: str) -> None:
    world = World(rank=0, size=2, local_size=local_size, source="torchrun", address=address, port=1)
    with environment.patched({"LOCAL_WORLD_SIZE": told}):
        assert interface.meeting_address(world) == meets_at


def test_it_listens_at_one_address() -> None:
    number = interface.listen("127.0.0.1", 0)
    assert number is not None
    with socket.socket(fileno=number) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError):
            interface.listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("address", ["127.0.1.1", "localhost", "203.0.113.7", "no-such-host.invalid", "n" * 64])
def test_an_address_that_other_hosts_do_not_reach_is_none_to_listen_at(address: str) -> None:
    assert interface.listen(address, 0) is None


def test_a_network_card_of_the_users_stays() -> None:
    with environment.patched({"GLOO_SOCKET_IFNAME": "eth7"}):
        interface.keep_gloo_on_loopback("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    with environment.patched({"GLOO_SOCKET_IFNAME": None}):
        interface.keep_gloo_on_loopback("10.0.0.1")
        assert "GLOO_SOCKET_IFNAME" not in os.environ
