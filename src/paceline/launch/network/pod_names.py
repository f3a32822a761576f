"""Node 0's name in a pod: the name server knows it some seconds after the pod, and for a while as that of an old one."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from paceline.launch.launcher import Job
from paceline.world.detect.kubernetes import in_pod

_PAUSE_S = 0.5
_CONNECT_S = 2.0


def await_main_address(job: Job, env: Mapping[str, str], patience_s: float) -> None:
    """In a pod: waits until node 0's name leads to a launcher that listens, or to this very pod.

    Elsewhere, and where the patience ends, it returns at once: what is wrong is then told by whoever needs the address.

    Args:
        job: of one of several nodes.
        env: the environment of this process.
        patience_s: how long to wait.
    """
    if not in_pod(env) or not job.numbered or "," in job.main_address:
        return
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            if job.node_rank == 0:
                socket.getaddrinfo(job.main_address, job.main_port)
                return
            # The launcher on the other side takes a connection without a word for a stranger's, and forgets it.
            socket.create_connection((job.main_address, job.main_port), _CONNECT_S).close()
            return
        time.sleep(_PAUSE_S)
