"""`MetricsProcess`: `paceline metrics` beside a launcher, which has no threads, since its processes are forks of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from paceline.base.errors import LaunchError


class MetricsProcess:
    """Serves the metrics of a watched run until it is closed, or until the launcher and its processes have gone.

    Args:
        folder: of the journal.
        port: to listen on, on the loopback address.
    """

    def __init__(self, folder: Path, port: int) -> None:
        read, self._write = os.pipe()
        command = [sys.executable, "-m", "paceline", "metrics", str(folder), "--port", str(port), "--until-closed"]
        self._process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(read)

    def close(self) -> None:
        """Ends it."""
        os.close(self._write)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def check_port(port: int) -> None:
    """Tries the port before anything is started.

    Raises:
        LaunchError: `metrics-port`.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                "metrics-port",
                f"metrics cannot be served at 127.0.0.1:{port}.",
                why=f"--metrics-port is {port}: {error.strerror}",
                fix="name another port; `--metrics-port 0` takes a free one and prints it",
            ) from None
