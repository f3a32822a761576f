"""Node 0's name in a pod, which the name server learns late, and which leads to an old pod for a while."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from paceline.launch.job import Job, Target
from paceline_hosts.network import addresses
from paceline_hosts.network.addresses import await_main_address

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
NAME = "train-node-0-0.train"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the name server says of pod 0, one answer a question; "" for a name that it does not know."""
    given: list[str] = []
    real = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return real(host, *args, **kwargs)
        address = given.pop(0) if len(given) > 1 else given[0]
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        return real(address, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(addresses, "_POD_RETRY_S", 0.01)
    return given


def job(node: int, port: int, **changes: Any) -> Job:
    values = {"nodes": 2, "node_rank": node, "main_address": NAME, "main_port": port, **changes}
    return Job(Target("script", "t.py"), **values)


def test_pod_0_waits_for_its_own_name(answers: list[str], port: int) -> None:
    answers += ["", "", "127.0.0.1"]
    await_main_address(job(0, port), IN_POD, 10)
    assert answers == ["127.0.0.1"]


def test_the_others_wait_until_somebody_listens(answers: list[str], port: int) -> None:
    # First no name, then the address of a pod that is gone, then the new pod, which listens a little later.
    answers += ["", "127.0.0.9", "127.0.0.1"]
    begun = time.monotonic()

    def listen() -> None:
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()

    thread = threading.Thread(target=listen)
    thread.start()
    await_main_address(job(1, port), IN_POD, 10)
    assert 0.25 < time.monotonic() - begun < 5
    thread.join()


def test_its_patience_ends(answers: list[str], port: int) -> None:
    answers += [""]
    begun = time.monotonic()
    await_main_address(job(1, port), IN_POD, 0.2)
    assert 0.15 < time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("env", "changes"), [({}, {}), (IN_POD, {"numbered": False}), (IN_POD, {"main_address": f"{NAME},b"})]
)
def test_elsewhere_nobody_waits(answers: list[str], port: int, env: dict[str, str], changes: dict[str, Any]) -> None:
    answers += [""]
    begun = time.monotonic()
    await_main_address(job(1, port, **changes), env, 10)
    assert time.monotonic() - begun < 0.1
