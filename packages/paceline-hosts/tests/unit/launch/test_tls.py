"""Connections that are encrypted: who can speak over them, what they show, and what cannot be used."""

from __future__ import annotations

import random
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from strangers import message

from paceline.base.errors import LaunchError
from paceline.launch.rounds import Member, Round
from paceline_hosts.membership import errors
from paceline_hosts.membership.messages import Heartbeat, Message, Proposal
from paceline_hosts.network import tls
from paceline_hosts.network.connection import Connection
from paceline_hosts.network.tls import Tls

SECRET = "0123456789abcdef"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


@pytest.fixture(scope="module")
def own() -> Tls:
    made = Tls.of("yes")
    assert made is not None
    return made


@pytest.fixture(scope="module")
def other() -> Tls:
    made = Tls.of("yes")
    assert made is not None
    return made


OPENED: list[Connection] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Closes the connections of a test."""
    yield
    while OPENED:
        OPENED.pop().sock.close()


def pair(listens: Tls | None, calls: Tls | None, secret: str = SECRET) -> tuple[Connection, Connection]:
    """Both ends of a connection."""
    one, two = socket.socketpair()
    listener, caller = Connection(2, one, SECRET, False, "peer", listens), Connection(1, two, secret, True, tls=calls)
    caller.connecting = False
    listener.flush()
    OPENED.extend([listener, caller])
    return listener, caller


def exchange(*ends: Connection, until: Callable[[], bool], rounds: int = 4000) -> list[Message]:
    """Serves both ends in turn; returns what came."""
    messages: list[Message] = []
    for _ in range(rounds):
        for end in ends:
            if not end.problem:
                end.flush()
                messages += end.receive()[0]
        if until():
            break
    return messages


def test_messages_pass_encrypted(own: Tls, other: Tls) -> None:
    listener, caller = pair(own, other)
    caller.send(Heartbeat(1))
    assert exchange(listener, caller, until=lambda: listener.proved and caller.proved)[-1:] in ([Heartbeat(1)], [])
    members = tuple(Member(f"{number}", "host" * 10, 8, "10.0.0.1", 1) for number in range(10_000))
    listener.send(Proposal(Round(1, 0, members), ()))
    arrived: list[Message] = []
    for _ in range(4000):
        listener.flush()
        arrived += caller.receive()[0]
        if arrived:
            break
    assert arrived == [Proposal(Round(1, 0, members), ())]  # a megabyte, in many records
    assert caller.sock.version() == "TLSv1.3"  # type: ignore[attr-defined]


def test_nothing_can_be_read_on_the_way(own: Tls) -> None:
    listener, caller = pair(own, own)
    exchange(listener, caller, until=lambda: listener.proved and caller.proved)
    word = "a word that is easily found"
    caller.send(Heartbeat(1))
    caller.send(Proposal(Round(1, 0, (Member(word, word, 1),)), ()))
    data = socket.socket.recv(listener.sock, 1 << 16)
    assert len(data) > 200 and word.encode() not in data


def test_somebody_in_the_middle_is_found(own: Tls, other: Tls) -> None:
    """He ends the caller's TLS with a certificate of his own, and passes on what the two say."""
    fingerprint = own.fingerprint
    listener, caller = pair(replace(own, fingerprint=other.fingerprint), own)
    assert fingerprint != other.fingerprint
    exchange(listener, caller, until=lambda: bool(listener.problem and caller.problem))
    assert (listener.problem, caller.problem) == ("secret", "secret")


def test_another_secret_is_told_so(own: Tls) -> None:
    listener, caller = pair(own, own, "another secret of 16")
    exchange(listener, caller, until=lambda: bool(listener.problem and caller.problem))
    assert (listener.problem, caller.problem) == ("secret", "secret")


@pytest.mark.parametrize("encrypts", [True, False])
def test_both_must_encrypt(own: Tls, encrypts: bool) -> None:
    listener, caller = pair(own if encrypts else None, None if encrypts else own)
    exchange(caller, until=lambda: bool(caller.problem))
    assert caller.problem == "tls" and not listener.proved
    problem = errors.mismatch({("10.0.0.1", 29500): "tls"})
    assert problem is not None and problem.code == "launch-tls" and "10.0.0.1:29500" in problem.what


@pytest.mark.parametrize("seed", range(200))
def test_strangers_at_an_encrypted_port(own: Tls, seed: int) -> None:
    """Whatever they send, before and in the midst of a handshake, nothing is read as a message and nothing is raised."""
    draw = random.Random(seed)
    one, two = socket.socketpair()
    listener = Connection(2, one, SECRET, False, "peer", own)
    listener.flush()
    if seed % 2:
        caller = Connection(1, two, SECRET, True, tls=own)
        caller.connecting = False
        exchange(caller, listener, until=lambda: False, rounds=draw.randrange(3))
        two = caller.sock
    two.setblocking(False)
    for _ in range(5):
        try:
            socket.socket.send(two, message(draw))
        except OSError:
            break
        messages, goes_on = listener.receive()
        assert messages == []
        if not goes_on:
            break
    two.close()
    for _ in range(3):
        if not listener.problem:
            assert listener.receive()[0] == []
    assert seed % 2 or not listener.proved
    listener.sock.close()


def test_certificates_of_the_user(tmp_path: Path, own: Tls) -> None:
    tls._make(tmp_path / "a.pem", tmp_path / "a.key")
    tls._make(tmp_path / "b.pem", tmp_path / "b.key")
    setting = f"{tmp_path}/a.pem,{tmp_path}/a.key"
    alone = Tls.of(setting)
    trusting = Tls.of(f"{setting},{tmp_path}/a.pem")  # which has signed itself
    others = Tls.of(f"{tmp_path}/b.pem,{tmp_path}/b.key,{tmp_path}/b.pem")
    for listens, calls, works in ((alone, alone, True), (trusting, trusting, True), (trusting, others, False)):
        listener, caller = pair(listens, calls)
        exchange(listener, caller, until=lambda a=listener, b=caller: a.proved and b.proved, rounds=200)  # type: ignore[misc]
        assert (listener.proved and caller.proved) == works
    assert alone is not None and alone.fingerprint != own.fingerprint


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "garbage").write_text("garbage")
    tls._make(tmp_path / "a.pem", tmp_path / "a.key")
    for setting, why in (
        (f"{tmp_path}/nowhere,{tmp_path}/a.key", "no such file"),
        (f"{tmp_path}/garbage,{tmp_path}/a.key", "it holds no pem certificate"),
        (f"{tmp_path}/a.pem,{tmp_path}/garbage", "--tls"),
    ):
        with pytest.raises(LaunchError, match="launch-tls") as error:
            Tls.of(setting)
        assert why in str(error.value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="launch-tls") as error:
        Tls.of("yes")
    assert "there is no program `openssl`" in str(error.value)
    assert Tls.of("no") is None
