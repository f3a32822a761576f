"""What a rank does while the others do not come, or while a program that is no store of torch has their port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import WorldError
from paceline.world.network import tcp_store
from paceline.world.roll_call import roll_call
from paceline.world.world import World


def second_of_two(port: int) -> World:
    return World(rank=1, size=2, local_rank=1, local_size=2, source="torchrun", address="127.0.0.1", port=port)


@contextlib.contextmanager
def another_program(answer: bytes) -> Iterator[int]:
    """A server that answers each connection, or never if the answer is empty. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while answer:
                    with server.accept()[0] as connection:
                        connection.recv(100)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_another_program_has_the_port(answer: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    began = time.monotonic()
    with another_program(answer) as port, pytest.raises(WorldError) as caught:
        tcp_store.connect(second_of_two(port), 0.3)
    assert time.monotonic() - began < 5
    assert caught.value.code == "rendezvous-unreachable" and "it is no store of torch" in str(caught.value)
    # torch's own client prints its stack. If a thread still waits in it when Python ends, the process aborts.
    assert capfd.readouterr() == ("", "")
    assert threading.active_count() == threads


def test_a_long_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tcp_store, "NOTICE_S", 0.0)
    monkeypatch.setattr("paceline.world.roll_call.NOTICE_S", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(WorldError):
            tcp_store.connect(second_of_two(port), 0.1)
    first_of_three = World(rank=0, size=3, source="torchrun", address="127.0.0.1", port=port)
    with pytest.raises(WorldError):
        roll_call(dist.HashStore(), first_of_three, torch.device("cpu"), "gloo", 0.1)
    waits_for_rank_0, waits_for_others = [record.getMessage() for record in caplog.records]
    assert f"rank 1 has waited 0 s for rank 0 at 127.0.0.1:{port}, and waits 0 s more (" in waits_for_rank_0
    assert "rank 0 has waited 0 s for 2 ranks (1-2) of 3" in waits_for_others
