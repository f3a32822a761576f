"""Connections of this process to a few ranks of its group: those at distance 1, 2, 4, ... around the ring.

`Messages` sends small messages over them. With gloo, a small message passes through two threads of gloo before the waiting
thread gets it. That takes longer than the network does, and many times longer on a busy machine. So small messages have plain
sockets of their own, ceil(log2(n)) in each direction, and the waiting thread reads them itself. A message takes 26 us from
rank to rank; with gloo it takes 150 us or more.

    first use   each rank listens, and writes its address and a random token into the store;
                it connects to the ranks below it and sends the token of each, and the ranks above connect to it
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
from paceline.world import lifetime, rendezvous
from paceline.world.lifetime import Leaving
from paceline.world.network import interface, tcp_store

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_LENGTH = struct.Struct("<Q")
_TOKEN_BYTES = 16
_CALL = struct.Struct(f"<{_TOKEN_BYTES}sI")  # the token of the called rank, and the rank that calls
_CONNECT_S = 30.0
# A caller may be another program, which never sends the token.
_CALL_S = 5.0
# The system's buffer in each direction: two of the largest messages may be under way.
_BUFFER_BYTES = 1 << 18


class _Broken(RuntimeError):
    """A connection was closed, or no message came in time."""


@dataclass(frozen=True)
class _ListeningPlace:
    """Holds where a rank listens.

    Attributes:
        host: the name of its host, for errors, and to find the ranks on the same host.
        addresses: its addresses, with their ports.
        token: what a caller must send first, in hexadecimal digits.
    """

    host: str
    addresses: list[tuple[str, int]]
    token: str


class Links:
    """The connections of this rank in one group.

    Args:
        group: the ranks that take part; it takes tensors on the CPU.

    Attributes:
        distances: the distances around the ring to the ranks with which this rank is connected.

    Ranks:
        All ranks of the group construct it, and make each exchange together.

    Raises:
        WorldError: `rendezvous-group`, on every rank, if two of them could not connect.
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
        """Sends to the rank `distance` below, receives from the rank `distance` above, and returns how many bytes came.

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
            # `base.connections` recognises lost connections by these words.
            words = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            self._broken = f"ProcessGroup: rank {self.rank}, with ranks {above} and {below}: {words}"
            self.close()
            raise _Broken(self._broken) from error
        except BaseException:
            # The handler of a signal has raised in the middle of a message, so later messages could not be told apart.
            self._broken = "ProcessGroup: Connection closed by peer: an earlier operation was interrupted"
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections; the ranks at the other ends see that."""
        for connection in (*self._below.values(), *self._above.values()):
            connection.close()

    # -------------------------------------------------------------------- messages

    def _swap(self, below: socket.socket, above: socket.socket, outgoing: memoryview, incoming: memoryview) -> int:
        """Sends one message and receives one at the same time. Returns the size of the received one."""
        count = below.sendmsg((_LENGTH.pack(len(outgoing)), outgoing)) - _LENGTH.size
        assert count >= 0, "the system takes at least a few bytes"
        sent: Future[None] | None = None
        if count < len(outgoing):
            # The buffers of the system are full. If all ranks only sent, none would empty them, so this one must also receive.
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
        # The store may be older than this run, and hold the places of another one. So the keys begin with a random number.
        prefix = torch.tensor(list(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8, device="cpu")
        dist.broadcast(prefix, group=group, group_src=0)
        store = rendezvous.part(f"links/{prefix.numpy().tobytes().hex()}")
        listeners: list[socket.socket] = []
        try:
            failure = ""
            place = _ListeningPlace(socket.gethostname(), [], secrets.token_hex(_TOKEN_BYTES))
            try:
                for address in interface.own_addresses(tcp_store.host(rendezvous.store())):
                    listeners.append(_listener(address))
                    place.addresses.append(listeners[-1].getsockname()[:2])
            except OSError as error:
                failure = f"rank {self.rank} ({place.host}) cannot listen: {error}"
            store.set(str(self.rank), json.dumps(asdict(place)))
            # After this, all ranks have written their places.
            dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
            if failure:
                raise ConnectionError(failure)
            self._call(store, place.host)
            self._answer(listeners, place.token)
            # If one rank has failed, its connections are closed, and after these rounds every rank knows it.
            for distance in self.distances:
                self.exchange(distance, memoryview(b""), memoryview(b""))
        except (OSError, _Broken) as error:
            self.close()
            # The first rank that fails writes its reason into the store. The reason of the others is only a closed connection.
            own_reason = str(error).splitlines()[0]
            first_reason = bytes(store.compare_set("failed", "", own_reason)).decode()
            raise WorldError(
                "rendezvous-group",
                f"the {self.size} processes have met, but could not connect with each other for small messages.",
                why=first_reason,
                fix="set GLOO_SOCKET_IFNAME to the network interface that all hosts share, and open its ports between them",
            ) from error
        finally:
            for listener in listeners:
                listener.close()
        for connection in (*self._below.values(), *self._above.values()):
            connection.settimeout(self._timeout_s)

    def _call(self, store: Store, own_host: str) -> None:
        """Connects to the ranks below. The system accepts for them, so no rank waits for another one here."""
        ranks = {distance: (self.rank - distance) % self.size for distance in self.distances}
        keys = [str(rank) for rank in ranks.values()]
        for (distance, rank), place_as_json in zip(ranks.items(), store.multi_get(keys), strict=True):
            place = _ListeningPlace(**json.loads(place_as_json))
            reasons = []
            is_elsewhere = place.host != own_host
            # A loopback address of another host is tried last, but not skipped: containers with different host names may
            # share one network.
            addresses = sorted(place.addresses, key=lambda pair: is_elsewhere and interface.is_loopback(pair[0]))
            for address, port in addresses:
                try:
                    self._below[distance] = _called(address, port, bytes.fromhex(place.token), self.rank)
                    break
                except OSError as error:
                    reasons.append(f"{address}:{port}: {error.strerror or error}")
            if distance not in self._below:
                why = "; ".join(reasons)
                raise ConnectionError(f"rank {self.rank} ({own_host}) cannot reach rank {rank} ({place.host}): {why}")

    def _answer(self, listeners: list[socket.socket], token: str) -> None:
        """Accepts the ranks above. A connection that does not send the token is closed."""
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
                received_token, rank = _read_call(connection)
                is_of_run = secrets.compare_digest(received_token, bytes.fromhex(token))
                if is_of_run and rank in distance_of:
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
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    unconnected = socket.socket(family, socket.SOCK_STREAM)
    # The sizes must be set before it connects, when the system announces them. Accepted sockets inherit those of a listener.
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    unconnected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return unconnected


def _called(address: str, port: int, token: bytes, own_rank: int) -> socket.socket:
    """Returns a connection to a rank, after it has sent the token."""
    connection = _socket(address)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect((address, port))
        connection.sendall(_CALL.pack(token, own_rank))
    except OSError:
        connection.close()
        raise
    return connection


def _accepted(listener: socket.socket) -> socket.socket | None:
    """Returns the next connection; None if there is none at the moment."""
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _read_call(connection: socket.socket) -> tuple[bytes, int]:
    """Returns the token and the rank that a caller sends. The caller may be another program and send anything."""
    connection.settimeout(_CALL_S)
    call = bytearray(_CALL.size)
    try:
        _receive(connection, memoryview(call))
    except OSError:
        return b"", -1
    token, rank = _CALL.unpack(call)
    return token, rank


def _receive(above: socket.socket, incoming: memoryview) -> None:
    """Receives until `incoming` is full."""
    while incoming:
        count = above.recv_into(incoming)
        if not count:
            raise ConnectionResetError("Connection closed by peer")
        incoming = incoming[count:]


def _in_a_thread(below: socket.socket, rest: memoryview) -> Future[None]:
    """Sends in a thread; the future ends when all was sent."""
    sent: Future[None] = Future()

    def send() -> None:
        try:
            below.sendall(rest)
            sent.set_result(None)
        except OSError as error:
            sent.set_exception(error)

    threading.Thread(target=send, name="paceline-send", daemon=True).start()
    return sent


class _LinksOfGroups:
    """Holds the links of all groups of this process until it leaves.

    All operations of a group share its links. So if ranks call different operations, they find that out.
    """

    def __init__(self) -> None:
        self.links: dict[dist.ProcessGroup, Links] = {}

    def close(self, leaving: Leaving) -> None:
        """Closes all links."""
        for links in self.links.values():
            links.close()


def links_of(group: dist.ProcessGroup) -> Links:
    """Returns the links of a group.

    Ranks:
        All ranks of the group, the first time.
    """
    links_of_groups = lifetime.of_process().kept(_LinksOfGroups)
    if links_of_groups is None:
        links_of_groups = _LinksOfGroups()
        lifetime.of_process().keep(links_of_groups)
    if group not in links_of_groups.links:
        links_of_groups.links[group] = Links(group)
    return links_of_groups.links[group]
