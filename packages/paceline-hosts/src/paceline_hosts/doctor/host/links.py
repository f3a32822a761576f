"""Connects hosts and measures the connections: each host listens at a port, and the others connect to it.

A connection begins with the token of the examination, by which a listener recognises the other hosts, and a letter:

    c   connect: one byte comes back
    p   ping: each byte comes back
    s   stream: bytes for a while, then the receiver says how many came in how many seconds
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline.launch import host
from paceline_hosts.doctor.facts import ConnectionFacts, LinkFacts, Outcome

CONNECT_S = 3.0
_SILENCE_S = 5.0  # a peer that sends nothing for so long is taken to be gone
_PINGS = 30
_CHUNK = 1 << 20
# This part of a stream, at its beginning, is not counted: TCP starts slowly while it finds out how much the path can carry.
_WARM_UP = 0.25


class LinkListener:
    """Listens at a port of this host, and answers the other hosts.

    Args:
        token: the token that a connection must begin with.

    Attributes:
        port: the port, a free one, at all addresses of this host.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._socket = host.hold_port(0)
        self._socket.listen(256)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        # Closing alone does not wake the thread that waits in `accept`; the shutdown does. Some systems refuse a shutdown
        # for a socket that listens.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # `close` ends the loop with this error
            while True:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):  # the peer has gone; it reports the error on its side
            peer.settimeout(_SILENCE_S)
            # Without this, the system collects small packets for some time before it sends them, and pings would be slow.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            header = _receive(peer, len(self._token) + 1)
            # The comparison takes the same time for every wrong token, so a stranger cannot guess it byte by byte.
            if not hmac.compare_digest(header[:-1], self._token):
                return
            if header[-1:] == b"s":
                _take_stream(peer)
                return
            peer.sendall(b".")
            while header[-1:] == b"p":
                data = peer.recv(1)
                if not data:
                    return
                peer.sendall(data)


def connections(source: str, peers: Mapping[str, tuple[Sequence[str], int]], token: str) -> list[ConnectionFacts]:
    """Connects to each other host, all at the same time.

    Args:
        source: name of this host.
        peers: host -> its addresses, the likeliest first, and the port at which it listens.
        token: the token that a connection begins with.

    Returns:
        One row for each other host, with the first of its addresses that answered.
    """
    outcomes: dict[tuple[str, str], Outcome] = {}

    def attempt(name: str, address: str, port: int) -> None:
        outcomes[name, address] = _outcome(address, port, token)

    threads = []
    for name, (addresses, port) in peers.items():
        for address in addresses:
            threads.append(threading.Thread(target=attempt, args=(name, address, port), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = []
    for name, (addresses, port) in peers.items():
        usable = [address for address in addresses if outcomes[name, address] == "open"]
        if usable:
            rows.append(ConnectionFacts(source, name, usable[0], port, "open"))
        elif addresses:
            rows.append(ConnectionFacts(source, name, addresses[0], port, outcomes[name, addresses[0]]))
        else:
            rows.append(ConnectionFacts(source, name, "", port, "no route"))
    return rows


def _outcome(address: str, port: int, token: str) -> Outcome:
    try:
        with _connect(address, port, token, b"c") as peer:
            return "open" if peer.recv(1) == b"." else "other"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    except ConnectionError:
        return "other"  # it was accepted and then closed: the program that listens there does not know the token
    except OSError as error:
        return "no route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL) else "refused"


def _connect(address: str, port: int, token: str, verb: bytes) -> socket.socket:
    peer = socket.create_connection((address, port), CONNECT_S)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(token.encode() + verb)
    except OSError:
        peer.close()
        raise
    return peer


def measure(source: str, target: str, address: str, port: int, token: str, seconds: float) -> LinkFacts:
    """Measures the path from this host to another: latency by pings, then bandwidth by a stream.

    Raises:
        OSError: the connection failed during the measurement.
    """
    trips = []
    with _connect(address, port, token, b"p") as peer:
        # The listener sends one byte when it has accepted the token; the pings begin after it.
        _receive(peer, 1)
        for _ in range(_PINGS):
            begun = time.perf_counter()
            peer.sendall(b".")
            _receive(peer, 1)
            trips.append(time.perf_counter() - begun)
    with _connect(address, port, token, b"s") as peer:
        rate = _send_stream(peer, seconds)
    return LinkFacts(source, target, statistics.median(trips) / 2, rate)


def _send_stream(peer: socket.socket, seconds: float) -> float:
    """Sends for some seconds, and returns the bytes per second that the receiver has counted."""
    peer.sendall(json.dumps(seconds).encode() + b"\n")
    chunk = memoryview(bytes(_CHUNK))
    # With this option, closing discards what is still in the buffers. On a slow link it would disturb the next measurement.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # With a short timeout, a full buffer cannot keep the loop from ending in time.
    peer.settimeout(0.1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(TimeoutError):
            peer.send(chunk)
    peer.settimeout(_SILENCE_S)
    peer.shutdown(socket.SHUT_WR)
    return float(json.loads(_line(peer)))


def _take_stream(peer: socket.socket) -> None:
    seconds = float(json.loads(_line(peer)))
    buffer = bytearray(_CHUNK)
    arrived: list[tuple[float, int]] = []
    end = float("inf")
    size = 1
    # The loop ends when the time is up, even if a slow link still has bytes in its buffers.
    while size and time.perf_counter() < end:
        size = peer.recv_into(buffer)
        now = time.perf_counter()
        arrived.append((now, size))
        # The time starts with the first piece, so that the way of the request does not count.
        if len(arrived) == 1:
            end = now + seconds
    peer.sendall(json.dumps(rate(arrived)).encode() + b"\n")
    peer.shutdown(socket.SHUT_WR)
    # The system resets a connection that is closed with unread bytes, and the answer may be lost with it.
    while peer.recv_into(buffer):
        pass


def rate(arrived: Sequence[tuple[float, int]]) -> float:
    """Returns the bytes per second of a stream without its first part; 0 if the stream is too short to say.

    Args:
        arrived: time and number of bytes of each piece.
    """
    first = arrived[0][0]
    last = arrived[-1][0]
    begun = first + (last - first) * _WARM_UP
    warm = [piece for piece in arrived if piece[0] > begun]
    before = [at for at, _ in arrived if at <= begun]
    duration = last - before[-1]
    if duration <= 0:
        return 0.0
    return sum(size for _, size in warm) / duration


def _receive(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        data += part
    return data


def _line(peer: socket.socket) -> bytes:
    """Reads one line byte by byte, because the bytes after it belong to the stream."""
    data = b""
    while not data.endswith(b"\n"):
        data += _receive(peer, 1)
    return data
