"""What somebody without the run's secret may send to a launcher's port: lines from a grammar, and bytes at random."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

# Each ended a waiting launcher, or one in mid-run, before launchers proved their secret to each other.
ONE_LINERS = (
    b'{"hello": 5}\n',
    b'{"home": []}\n',
    b'{"home": 5}\n',
    b'{"hello": {}, "rules": 1}\n',
    b"[" * 100_000 + b"\n",
    b'{"hello": {"id": "x", "host": "x", "procs": 1}, "rules": [2, 2, 0, "another"], "round": 0}\n',
    b'{"hello": {"id": "x", "host": "x", "procs": 1}, "rules": [2, 2, 0, "paceline"], "round": 0}\n',
    b'{"home": ["127.0.0.1", 1], "run": "paceline", "id": "x", "born": 0}\n',
    b'{"probe": NaN}\n',
)
_WORDS = (
    *("join", "probe", "announce", "status", "joined", "noleader", "redirect", "refused", "expelled", "heartbeat"),
    *(
        "heartbeatack",
        "processesended",
        "accept",
        "draining",
        "leave",
        "proposal",
        "commit",
        "stopprocesses",
        "runended",
    ),
    *("switchrun", "members", "configurations", "end", "rules", "round", "run", "number", "report", "member_id"),
    *("id", "founded_at", "leads", "place", "member", "kind", "why", "how", "paceline", "save"),
)


def value(draw: random.Random, depth: int = 0) -> object:
    """Some value that JSON knows, often of the wrong type."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice(_WORDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    atoms = (None, draw.random() < 0.5, draw.randint(-9, 9), draw.choice((1e308, float("nan"), 2**70)))
    return (*atoms, draw.choice(_WORDS), "x" * draw.randrange(300))[kind]


def message(draw: random.Random) -> bytes:
    """One line, or something like it."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice(ONE_LINERS)
    if kind == 1:
        return draw.randbytes(draw.randrange(1, 2000))
    if draw.random() < 0.1:  # a record of TLS: its type, version and length, and something inside
        inside = draw.randbytes(draw.randrange(0, 600))
        length = draw.choice((len(inside), draw.randrange(1 << 16)))
        return draw.choice((b"\x14", b"\x15", b"\x16", b"\x17")) + b"\x03\x03" + length.to_bytes(2) + inside
    if kind == 2:  # the form of a proof, without the secret
        return f"{draw.randbytes(32).hex()} {draw.randbytes(32).hex()}\n".encode()
    if kind == 3:
        return b"paceline-launch-1 " + draw.randbytes(32).hex().encode() + b"\n"
    if kind == 4:
        return draw.randbytes(32).hex().encode() + b" " + json.dumps(value(draw)).encode() + b"\n"
    said = {draw.choice(_WORDS): value(draw) for _ in range(draw.randrange(1, 4))}
    if kind < 8:
        said["kind"] = draw.choice(_WORDS)
    return json.dumps(said).encode() + b"\n"


class Stranger:
    """Sends messages to a launcher's port, a few over each connection; some connections stay open, and silent."""

    def __init__(self, port: int, seed: int = 0, address: str = "127.0.0.1") -> None:
        self.place, self.draw = (address, port), random.Random(seed)
        self.sent = 0
        self._open: list[socket.socket] = []

    def send(self, count: int) -> None:
        """Sends this many; one that is refused, or cut off, counts too."""
        for _ in range(count):
            self.sent += 1
            if not self._open or self.draw.random() < 0.4:
                self._connect()
            if self._open:
                with suppress(OSError):
                    self.draw.choice(self._open).send(message(self.draw), socket.MSG_DONTWAIT)

    def _connect(self) -> None:
        with suppress(OSError):
            self._open.append(socket.create_connection(self.place, 1))
        if len(self._open) > 100:
            self._open.pop(self.draw.randrange(len(self._open))).close()

    def close(self) -> None:
        """Hangs up."""
        while self._open:
            self._open.pop().close()


def one_liners(port: int) -> Iterator[bytes]:
    """Sends each of `ONE_LINERS` over a connection of its own, and yields it once the launcher has hung up."""
    for line in ONE_LINERS:
        with socket.create_connection(("127.0.0.1", port), 5) as link, suppress(OSError):
            link.sendall(line)
            while link.recv(1 << 16):
                pass
        yield line
