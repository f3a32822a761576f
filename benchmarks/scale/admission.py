"""What TLS costs launchers: microseconds of CPU to admit one (both ends together), and for each message.

python benchmarks/scale/admission.py [--turns 200]

Both ends are in one process, joined by a socket of the system; with and without TLS in alternating turns.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time

from paceline_hosts.membership.messages import Heartbeat
from paceline_hosts.network.connection import Connection
from paceline_hosts.network.tls import Tls

SECRET = "a secret of this benchmark"
MESSAGES = 200


def turn(tls: Tls | None) -> tuple[float, float]:
    """Seconds of CPU to prove both ends, and for one message."""
    one, two = socket.socketpair()
    begun = time.process_time()
    listener, caller = Connection(2, one, SECRET, False, "peer", tls), Connection(1, two, SECRET, True, tls=tls)
    caller.connecting = False
    listener.flush()
    while not (listener.proved and caller.proved):
        for end in (caller, listener):
            end.receive()
            end.flush()
    admitted = time.process_time()
    for number in range(MESSAGES):
        caller.send(Heartbeat(number))
        while not listener.receive()[0]:
            pass
    ended = time.process_time()
    one, two = listener.sock, caller.sock
    one.close()
    two.close()
    return admitted - begun, (ended - admitted) / MESSAGES


def rows(turns: int = 200) -> list[dict[str, float | str]]:
    """Medians, without and with TLS."""
    begun = time.perf_counter()
    own = Tls.of("yes")
    made_s = time.perf_counter() - begun
    times: dict[str, list[tuple[float, float]]] = {"no": [], "yes": []}
    for _ in range(turns):
        times["no"].append(turn(None))
        times["yes"].append(turn(own))
    found: list[dict[str, float | str]] = []
    for name, pairs in times.items():
        admission_us = statistics.median(pair[0] for pair in pairs) * 1e6
        message_us = statistics.median(pair[1] for pair in pairs) * 1e6
        certificate_ms = made_s * 1e3 if name == "yes" else 0.0
        found.append(
            {"tls": name, "admission_us": admission_us, "message_us": message_us, "certificate_ms": certificate_ms}
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    for row in rows(parser.parse_args().turns):
        print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
