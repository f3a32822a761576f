"""A real MLflow server on loopback, over a database in a file: it can be killed, and started again with what it had."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from free_ports import free_port


class MLflowServer:
    """The command `mlflow server`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}",
            "--default-artifact-root", str(self.folder / "artifacts"),
        ]  # fmt: skip
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
        deadline = time.monotonic() + 180  # on a busy machine, more than 90 s were seen
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                assert answer.status == 200
                return
            time.sleep(0.2)
        raise TimeoutError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        """Ends all its processes at once, as a machine that loses its power does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
