"""The actor on each node of a Ray cluster: it starts the agent (`remote/agent.py`) there and carries its messages.

Ray gives the actor the CPUs and GPUs of one bundle of the placement group, and names the GPUs in its environment
(CUDA_VISIBLE_DEVICES and the like), which the processes of this node inherit. Nothing of the run comes with the actor itself:
what an actor is made with (its class, its constructor's arguments, its runtime environment) is kept in the cluster's tables,
and some of it is shown in the dashboard. The assignment, with the run's secret, comes as the argument of a call, which goes
from the driver straight to this process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.temporary import temporary_folder
from paceline.base.version import VERSION
from paceline.launch import host
from paceline_hosts.assignment import python_version

# Where the processes of a node find the function that they are to call, and leave what it returned (`function.py`).
FOLDER = "PACELINE_RAY_FOLDER"
FUNCTION, VALUE = "function", "value"
_CHUNK = 1 << 16
# How much output is kept for the driver. A process that writes more waits until the driver has taken some.
_HELD_BYTES = 8 << 20


class NodeActor:
    """One node's end of the connection to the driver. Its methods are called by several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: list[tuple[int, bytes]] = []  # stream and data, in the order of their coming
        self._first = 0  # number of the first chunk that is kept
        self._held = 0  # bytes in these chunks
        self._open = 2  # not 0 while the agent may still write
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def facts(self) -> dict[str, Any]:
        """Returns what the driver must know of this node before it starts anything here."""
        import ray.util

        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = ""
        # Nodes of different kinds may have different builds (+cpu, +cu130) of the same release, which work together.
        release = torch.partition("+")[0]
        return {
            "address": ray.util.get_node_ip_address(),
            "host": host.name(),
            "paceline": VERSION,
            "python": python_version(),
            "torch": release,
            "cwd": os.getcwd(),
        }

    def start(self, folder: str, variables: Mapping[str, str | None], function: bytes | None) -> None:
        """Starts the agent, which waits for its assignment.

        Args:
            folder: the working directory, if it exists; if not, the agent reports it.
            variables: on top of this process's environment; None takes one out.
            function: what the processes are to call, packed; None where they run a script.
        """
        variables = dict(variables)
        if function is not None:
            self._folder = tempfile.mkdtemp(prefix="paceline-ray-", dir=temporary_folder())
            Path(self._folder, FUNCTION).write_bytes(function)
            variables[FOLDER] = self._folder
        started = threading.Event()
        # The system ends the process together with the thread that has started it (`signals.kill_with_parent`). Threads in
        # which Ray calls methods may end at any time; this one lasts as long as the process.
        threading.Thread(target=self._carry, args=(folder, variables, started), daemon=True).start()
        started.wait()

    def _carry(self, folder: str, variables: Mapping[str, str | None], started: threading.Event) -> None:
        """Starts the agent and keeps its output until it has ended."""
        env = environment.snapshot()
        for name, value in variables.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        command = [sys.executable, "-u", "-m", "paceline_hosts.remote", "attached"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            cwd=folder if os.path.isdir(folder) else None, env=env,
        )  # fmt: skip
        started.set()
        stdout = self._process.stdout
        stderr = self._process.stderr
        assert stdout is not None and stderr is not None, "it was started with pipes"
        copier = threading.Thread(target=self._copy, args=(2, stderr.fileno()), daemon=True)
        copier.start()
        self._copy(1, stdout.fileno())
        copier.join()
        with self._process:  # closes its pipes, and waits for it
            pass
        with self._changed:
            self._open = 0
            self._changed.notify_all()

    def _copy(self, stream: int, pipe: int) -> None:
        """Keeps the output of one stream until its end; waits while the driver has not taken enough of it."""
        while data := os.read(pipe, _CHUNK):
            with self._changed:
                self._changed.wait_for(lambda: self._held < _HELD_BYTES)
                self._chunks.append((stream, data))
                self._held += len(data)
                self._changed.notify_all()

    def send(self, data: bytes) -> None:
        """Passes messages on to the agent."""
        assert self._process is not None and self._process.stdin is not None, "it has been started"
        # If the agent has ended, the driver learns that from `receive`.
        with suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def receive(self, number: int, wait_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Returns output from chunk `number` on, and the exit code once all output has been taken.

        A chunk is kept until a later one is asked for, so that the driver can ask again if an answer was lost on the way.

        Args:
            number: the number of the first chunk that the driver has not taken.
            wait_s: how long to wait for output if there is none.
        """
        with self._changed:
            num_taken = number - self._first
            self._held -= sum(len(data) for _, data in self._chunks[:num_taken])
            del self._chunks[:num_taken]
            self._first = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._chunks or not self._open, wait_s)
            chunks = list(self._chunks)
        if self._open or chunks or self._process is None:
            return chunks, None
        return chunks, self._process.returncode

    def values(self) -> dict[int, bytes]:
        """Returns the packed values that the function returned on the ranks of this node, by rank."""
        files = sorted(Path(self._folder).glob(f"{VALUE}*"))
        return {int(file.name.removeprefix(VALUE)): file.read_bytes() for file in files}

    def close(self) -> None:
        """Removes the files of this run from the node."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
