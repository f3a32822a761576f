"""The rounds of small messages, among threads over socket pairs: every size, every mixture of what the ranks call."""

from __future__ import annotations

import ctypes
import mmap
import operator
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.world.network import interface
from paceline.world.network import links as link_module
from paceline.world.network.links import Links
from paceline.world.network.messages import WORD, Messages


def links(size: int) -> list[Links]:
    """Connected as those of processes are."""
    all_links = []
    for rank in range(size):
        own = Links.__new__(Links)
        own.rank, own.size = rank, size
        own.distances = [1 << number for number in range((size - 1).bit_length())]
        own._below, own._above, own._broken = {}, {}, ""
        all_links.append(own)
    for own in all_links:
        for distance in own.distances:
            above = all_links[(own.rank + distance) % size]
            own._above[distance], above._below[distance] = socket.socketpair()
            own._above[distance].settimeout(20)
            above._below[distance].settimeout(20)
    return all_links


def on_all(size: int, limit: int, work: Callable[[Messages], Any]) -> list[Any]:
    """What `work` gives on each rank."""
    outcomes: list[Any] = [None] * size
    connected = links(size)

    def run(rank: int) -> None:
        outcomes[rank] = work(Messages(connected[rank], limit))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for own in connected:
        own.close()
    return outcomes


def gathered(messages: Messages, text: bytes) -> list[bytes] | None:
    size = WORD.size + len(text)
    WORD.pack_into(messages.view, 0, size)
    messages.view[WORD.size : size] = text
    starts = messages.gather(size)
    if starts is None:
        return None
    texts = []
    for start in starts:
        (size,) = WORD.unpack_from(messages.view, start)
        texts.append(bytes(messages.view[start + WORD.size : start + size]))
    return texts


SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 13, 16]


@pytest.mark.parametrize("size", SIZES)
def test_gather(size: int) -> None:
    texts = [b"x" * (rank * 3 % 7) + str(rank).encode() for rank in range(size)]
    assert on_all(size, 64, lambda messages: gathered(messages, texts[messages.rank])) == [texts] * size


@pytest.mark.parametrize("size", SIZES)
def test_combine(size: int) -> None:
    ranks = range(size)
    sums = [sum(ranks), size, -sum(ranks)]
    assert on_all(size, 80, lambda m: m.combine(7, [m.rank, 1, -m.rank], operator.add)) == [sums] * size
    assert on_all(size, 64, lambda m: m.combine(7, [m.rank, -m.rank], max)) == [[size - 1, 0]] * size
    assert on_all(size, 64, lambda m: m.combine(7, [], max)) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_learns_that_one_does_something_else(size: int) -> None:
    for odd in range(size):

        def other_topic(messages: Messages, odd: int = odd) -> object:
            first = messages.combine(8 if messages.rank == odd else 7, [messages.rank], operator.add)
            return first, messages.combine(9, [1], operator.add)

        def other_way(messages: Messages, odd: int = odd) -> object:
            first = messages.combine(7, [], max) if messages.rank == odd else gathered(messages, b"abc")
            return first, gathered(messages, b"d")

        assert on_all(size, 64, other_topic) == [(None, [size])] * size
        assert on_all(size, 64, other_way) == [(None, [b"d"] * size)] * size


def test_messages_larger_than_the_buffers_of_the_system() -> None:
    texts = [bytes([rank]) * 3_000_000 for rank in range(3)]
    assert on_all(3, 3_000_008, lambda messages: gathered(messages, texts[messages.rank])) == [texts] * 3


def test_a_connection_that_was_closed_is_named() -> None:
    first, second = links(2)
    second.close()
    with pytest.raises(RuntimeError, match="rank 0, with ranks 1 and 1: "):
        first.exchange(1, memoryview(b"x"), memoryview(bytearray(8)))
    with pytest.raises(RuntimeError, match="rank 0, with ranks 1 and 1: "):
        first.exchange(1, memoryview(b"x"), memoryview(bytearray(8)))


def test_a_stranger_is_turned_away() -> None:
    own, other = links(2)
    own.close()
    other.close()
    own._above.clear()
    listener = link_module._listener("127.0.0.1")
    place = listener.getsockname()
    word = "ab" * 16
    strangers = [
        link_module._called(*place, bytes(16), 1),  # another word
        link_module._called(*place, bytes.fromhex(word), 7),  # the word, but no rank that calls this one
    ]
    silent = socket.create_connection(place)
    silent.close()
    friend = link_module._called(*place, bytes.fromhex(word), 1)
    own._answer([listener], word)
    assert own._above[1].getpeername() == friend.getsockname()
    assert all(stranger.recv(1) == b"" for stranger in strangers)
    for connection in (listener, friend, *strangers, *own._above.values()):
        connection.close()


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the whole pages of a tensor, how many bytes lie in memory."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - begin
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_room_that_no_message_has_reached_is_no_memory() -> None:
    # malloc would take the room from what it has kept of a large tensor, and such pages are in memory.
    torch.ones(1 << 22)
    own, other = links(2)
    for connected in (own, other):
        messages = Messages(connected, 1 << 21)
        assert messages.data.nbytes == 1 << 22
        assert resident_bytes(messages.data) == 0
        connected.close()


def test_addresses_of_this_host(monkeypatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses = interface.own_addresses("127.0.0.1")
    assert addresses[0] == "127.0.0.1" and interface.is_loopback(addresses[0])
    assert interface.own_addresses("no-such-host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface.own_addresses("127.0.0.1") == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(OSError):
        interface.own_addresses("127.0.0.1")
