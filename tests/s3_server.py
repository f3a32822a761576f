"""An S3 server on this machine, and a wire to it that can be cut: fixtures for tests of remote checkpoints."""

from __future__ import annotations

import itertools
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from free_ports import free_port

from paceline.base.env import patched

_buckets = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """moto's server, one for each process of the tests; its port."""
    pytest.importorskip("moto", reason="needs moto: `make setup`")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    assert server.poll() is None
    yield port
    server.kill()
    server.wait()


@pytest.fixture
def s3(s3_server: int) -> Iterator[str]:
    """A fresh bucket: `s3://bucket-7`; the environment leads to it."""
    with at_endpoint(s3_server):
        bucket = f"bucket-{next(_buckets)}"
        with closing(HTTPConnection("127.0.0.1", s3_server)) as plain:  # without fsspec: ranks are forked from here
            plain.request("PUT", f"/{bucket}")
            assert plain.getresponse().status == 200
        yield f"s3://{bucket}"


@contextmanager
def at_endpoint(port: int, **changes: str | None) -> Iterator[None]:
    """Sends S3's requests to a port of this machine; no configuration of the user is read."""
    variables = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with patched({**variables, **changes}):
        forget()
        yield
        forget()


def forget() -> None:
    """Closes connections that fsspec keeps: they know neither a new endpoint nor new credentials."""
    import s3fs
    from fsspec.asyn import sync

    for fs in list(s3fs.S3FileSystem._cache.values()):
        if fs._s3 is not None:
            sync(fs.loop, fs._s3.close)
    s3fs.S3FileSystem.clear_instance_cache()


def filesystem() -> Any:
    """The bucket as others see it."""
    from paceline_hosts.stores import objects

    return objects.filesystem("s3://")


class Wire:
    """A port that leads to another one until it is cut.

    Args:
        port: where it leads.
        most: bytes that go out before it is cut by itself; None for any number.

    Attributes:
        port: its own.
    """

    def __init__(self, port: int, most: int | None = None) -> None:
        self._target, self._left = port, most
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def cut(self) -> None:
        """Ends every connection; new ones are refused."""
        self._end.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _listen(self) -> None:
        with self._listener:
            while not self._end.is_set():
                if select.select([self._listener], [], [], 0.02)[0]:
                    near, _ = self._listener.accept()
                    thread = threading.Thread(target=self._carry, args=(near,))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            while not self._end.is_set():
                for source in select.select([near, far], [], [], 0.02)[0]:
                    try:
                        data = source.recv(1 << 16)
                        (far if source is near else near).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if source is near and self._left is not None:
                        self._left -= len(data)
                        if self._left < 0:
                            self._end.set()
