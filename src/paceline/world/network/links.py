"""Connections of this process to a few ranks of its group: those at distance 1, 2, 4, ... around the ring.

A small message over gloo passes two threads of gloo on its way to the one that waits for it. That takes longer than the
network does, and on a busy machine many times longer. So small messages have plain sockets of their own, ceil(log2(n)) in
each direction, and the thread that waits reads them itself: 26 us from rank to rank where gloo takes 150 or more.

    first use   each rank listens, and writes into the store where, with a random word;
                it calls the ranks below it, saying the word of the called one, and is called by those above it
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.base.errors import WorldError
from paceline.torch_internals.groups import timeout_of
from paceline.world import rendezvous
from paceline.world.network import interface, tcp_store

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_LENGTH = struct.Struct("<Q")
_WORD_BYTES = 16
_CALL = struct.Struct(f"<{_WORD_BYTES}sI")  # the word of the called rank, and which rank calls
_CONNECT_S = 30.0
_CALL_S = 5.0  # how long a caller, who may be a stranger, may take to say the word
_BUFFER_BYTES = 1 << 18  # of the system, in each direction: two of the largest messages may be under way


class _Broken(RuntimeError):
    """A connection was closed, or nothing came in time."""


@dataclass(frozen=True)
class _Place:
    """Where a rank listens.

    Attributes:
        host: its name, for people and to see who is on the same one.
        addresses: with their ports.
        word: what a caller must say.
    """

    host: str
    addresses: list[tuple[str, int]]
    word: str


class Links:
    """The connections of this rank in one group.

    Args:
        group: the ranks that take part; it takes tensors on the CPU.

    Attributes:
        distances: around the ring, how far away those are with whom this rank is connected.

    Ranks:
        All of the group make it, and each exchange with the others.

    Raises:
        WorldError: `rendezvous-group`, on every rank, where two of them could not connect.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.distances = [1 << number for number in range((self.size - 1).bit_length())]
        limit = timeout_of(group, torch.device("cpu"))
        self._timeout_s = None if limit is None else limit.total_seconds()
        self._below: dict[int, socket.socket] = {}  # by distance; this rank sends there
        self._above: dict[int, socket.socket] = {}  # this rank receives from there
        self._broken = ""
        self._connect(group)

    def exchange(self, distance: int, outgoing: memoryview, incoming: memoryview) -> int:
        """Sends to the rank `distance` below and receives from the one as far above; gives how many bytes came.

        Raises:
            RuntimeError: a connection was closed, or the other rank did not come in time.
        """
        if self._broken:
            raise _Broken(self._broken)
        try:
            return self._swap(self._below[distance], self._above[distance], outgoing, incoming)
        except OSError as error:
            above = (self.rank + distance) % self.size
            below = (self.rank - distance) % self.size
            # The words by which `base.connections` knows what it is about.
            words = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            self._broken = f"ProcessGroup: rank {self.rank}, with ranks {above} and {below}: {words}"
            self.close()
            raise _Broken(self._broken) from error
        except BaseException:
            # A signal's handler has raised, and what was under way is lost.
            self._broken = "ProcessGroup: Connection closed by peer: an earlier operation was interrupted"
            self.close()
            raise

    def close(self) -> None:
        """Ends the connections; the ranks at their other ends find them closed."""
        for connection in (*self._below.values(), *self._above.values()):
            connection.close()

    # -------------------------------------------------------------------- messages

    def _swap(self, below: socket.socket, above: socket.socket, outgoing: memoryview, incoming: memoryview) -> int:
        count = below.sendmsg((_LENGTH.pack(len(outgoing)), outgoing)) - _LENGTH.size
        assert count >= 0, "the system takes at least a few bytes"
        sent: Future[None] | None = None
        if count < len(outgoing):
            # The system's buffers are full. All ranks may be sending, so that this one must receive meanwhile.
            sent = _in_a_thread(below, outgoing[count:])
        length = bytearray(_LENGTH.size)
        _receive(above, memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > len(incoming):
            raise ConnectionResetError(f"Connection reset: a message of {size} bytes came where {len(incoming)} may")
        _receive(above, incoming[:size])
        if sent is not None:
            sent.result()
        return int(size)

    # -------------------------------------------------------------------- connecting

    def _connect(self, group: dist.ProcessGroup) -> None:
        # The store may have outlived another run, whose places would still be there. No rank of it knows this word.
        word = torch.tensor(list(secrets.token_bytes(_WORD_BYTES)), dtype=torch.uint8, device="cpu")
        dist.broadcast(word, group=group, group_src=0)
        store = rendezvous.part(f"links/{word.numpy().tobytes().hex()}")
        listeners: list[socket.socket] = []
        try:
            failure = ""
            place = _Place(socket.gethostname(), [], secrets.token_hex(_WORD_BYTES))
            try:
                for address in interface.own_addresses(tcp_store.host(rendezvous.store())):
                    listeners.append(_listener(address))
                    place.addresses.append(listeners[-1].getsockname()[:2])
            except OSError as error:
                failure = f"rank {self.rank} ({place.host}) cannot listen: {error}"
            store.set(str(self.rank), json.dumps(asdict(place)))
            # From here on all ranks are there, and all places are written.
            dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
            if failure:
                raise ConnectionError(failure)
            self._call(store, place.host)
            self._answer(listeners, place.word)
            # Every rank hears from every other one, if only that it is there.
            for distance in self.distances:
                self.exchange(distance, memoryview(b""), memoryview(b""))
        except (OSError, _Broken) as error:
            self.close()
            # Whoever fails first leaves word; the others find their connections closed.
            first = bytes(store.compare_set("failed", "", str(error).splitlines()[0])).decode()
            raise WorldError(
                "rendezvous-group",
                f"the {self.size} processes have met, but could not connect with each other for small messages.",
                why=first,
                fix="name the network card that all hosts share in GLOO_SOCKET_IFNAME, and open its ports between them",
            ) from error
        finally:
            for listener in listeners:
                listener.close()
        for connection in (*self._below.values(), *self._above.values()):
            connection.settimeout(self._timeout_s)

    def _call(self, store: Store, own_host: str) -> None:
        """Connects to the ranks below; the system accepts for them, so that nobody waits for anybody here."""
        ranks = {distance: (self.rank - distance) % self.size for distance in self.distances}
        keys = [str(rank) for rank in ranks.values()]
        for (distance, rank), place_as_json in zip(ranks.items(), store.multi_get(keys), strict=True):
            place = _Place(**json.loads(place_as_json))
            reasons = []
            elsewhere = place.host != own_host
            # Containers with names of their own may share one network, and its loopback too.
            likeliest_first = sorted(place.addresses, key=lambda at: elsewhere and interface.is_loopback(at[0]))
            for address, port in likeliest_first:
                try:
                    self._below[distance] = _called(address, port, bytes.fromhex(place.word), self.rank)
                    break
                except OSError as error:
                    reasons.append(f"{address}:{port}: {error.strerror or error}")
            if distance not in self._below:
                why = "; ".join(reasons)
                raise ConnectionError(f"rank {self.rank} ({own_host}) cannot reach rank {rank} ({place.host}): {why}")

    def _answer(self, listeners: list[socket.socket], word: str) -> None:
        """Accepts the ranks above; whoever does not say the word is turned away."""
        distance_of = {(self.rank + distance) % self.size: distance for distance in self.distances}
        deadline = time.monotonic() + _CONNECT_S
        while len(self._above) < len(self.distances):
            if time.monotonic() > deadline:
                missing = [rank for rank, distance in distance_of.items() if distance not in self._above]
                raise TimeoutError(f"rank {self.rank} was not called by rank {', '.join(map(str, missing))}")
            for listener in listeners:
                connection = _accepted(listener)
                if connection is None:
                    continue
                greeting, rank = _heard(connection)
                if secrets.compare_digest(greeting, bytes.fromhex(word)) and rank in distance_of:
                    self._above[distance_of[rank]] = connection
                else:
                    connection.close()


def _listener(address: str) -> socket.socket:
    listener = _socket(address)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    listener.settimeout(0.05)
    return listener


def _socket(address: str) -> socket.socket:
    unconnected = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    # Before it connects: the system tells the other side then how much it takes. A socket that accepts hands them on.
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return unconnected


def _called(address: str, port: int, word: bytes, own_rank: int) -> socket.socket:
    """A connection to a rank that listens there, after the word."""
    connection = _socket(address)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect((address, port))
        connection.sendall(_CALL.pack(word, own_rank))
    except OSError:
        connection.close()
        raise
    return connection


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _heard(connection: socket.socket) -> tuple[bytes, int]:
    """What a caller says: the word, and its rank. A stranger may say anything."""
    connection.settimeout(_CALL_S)
    greeting = bytearray(_CALL.size)
    try:
        _receive(connection, memoryview(greeting))
    except OSError:
        return b"", -1
    word, rank = _CALL.unpack(greeting)
    return word, rank


def _receive(above: socket.socket, incoming: memoryview) -> None:
    while incoming:
        count = above.recv_into(incoming)
        if not count:
            raise ConnectionResetError("Connection closed by peer")
        incoming = incoming[count:]


def _in_a_thread(below: socket.socket, rest: memoryview) -> Future[None]:
    sent: Future[None] = Future()

    def send() -> None:
        try:
            below.sendall(rest)
            sent.set_result(None)
        except OSError as error:
            sent.set_exception(error)

    threading.Thread(target=send, name="paceline-send", daemon=True).start()
    return sent


class _Open:
    """The links of all groups of this process, which end as it leaves. Operations of one group share them, whichever
    object they are called on, so that ranks that call different ones find out."""

    def __init__(self) -> None:
        self.links: dict[dist.ProcessGroup, Links] = {}

    def close(self, why: str) -> None:
        """Ends them."""
        for links in self.links.values():
            links.close()


def links_of(group: dist.ProcessGroup) -> Links:
    """The links of a group. Ranks: all of it, the first time."""
    opened = rendezvous.companion_of(_Open)
    if opened is None:
        opened = _Open()
        rendezvous.accompany(opened)
    if group not in opened.links:
        opened.links[group] = Links(group)
    return opened.links[group]
