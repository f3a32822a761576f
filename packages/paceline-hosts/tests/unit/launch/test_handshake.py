"""Both ends of a connection prove the secret, and nothing on the way can be changed, repeated or turned round."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline_hosts.network import secret
from paceline_hosts.network.handshake import MAGIC, Handshake, HandshakeError

SECRET = "0123456789abcdef"


def proved(theirs: str = SECRET) -> tuple[Handshake, Handshake]:
    """A caller and a listener after their proofs."""
    caller, listener = Handshake(SECRET, caller=True), Handshake(theirs, caller=False)
    _, proof = caller.receive(listener.greeting)
    _, answer = listener.receive(proof)
    caller.receive(answer)
    return caller, listener


def test_both_are_proved_and_messages_arrive_in_order() -> None:
    caller, listener = proved()
    assert caller.proved and listener.proved
    words = caller.seal(b"one") + caller.seal(b"two")
    assert listener.receive(words[:5])[0] == []
    assert listener.receive(words[5:])[0] == [b"one", b"two"]
    assert caller.receive(listener.seal(b"back"))[0] == [b"back"]


def test_another_secret_is_told_so() -> None:
    caller, listener = Handshake(SECRET, caller=True), Handshake("another secret, as long", caller=False)
    _, proof = caller.receive(listener.greeting)
    with pytest.raises(HandshakeError) as there:
        listener.receive(proof)
    with pytest.raises(HandshakeError) as here:
        caller.receive(there.value.reply)
    assert (there.value.how, here.value.how) == ("secret", "secret")
    assert not caller.proved and not listener.proved


def test_an_end_that_repeats_what_it_is_sent_proves_nothing() -> None:
    caller, listener = Handshake(SECRET, caller=True), Handshake(SECRET, caller=False)
    _, proof = caller.receive(listener.greeting)
    with pytest.raises(HandshakeError):
        caller.receive(proof.partition(b" ")[2])  # its own proof, as though it were the listener's
    replayed = Handshake(SECRET, caller=False)
    with pytest.raises(HandshakeError):
        replayed.receive(proof)  # a proof of another connection


@pytest.mark.parametrize(
    "spoil",
    [
        lambda first, second: second,  # one is left out
        lambda first, second: second + first,
        lambda first, second: first + first,
        lambda first, second: first.replace(b"one", b"two"),
        lambda first, second: b"one\n",
        lambda first, second: b"x" * (1 << 22) + b"x" * 100,
    ],
)
def test_messages_that_were_changed_end_the_connection(spoil: object) -> None:
    caller, listener = proved()
    with pytest.raises(HandshakeError):
        listener.receive(spoil(caller.seal(b"one"), caller.seal(b"two")))  # type: ignore[operator]
    caller, listener = proved()
    own = listener.seal(b"its own")
    with pytest.raises(HandshakeError):
        listener.receive(own)


def test_whatever_is_sent_nothing_is_read_without_proof() -> None:
    draw = random.Random(0)
    for _ in range(500):
        end = Handshake(SECRET, caller=draw.random() < 0.5)
        parts = [MAGIC, b" ", b"\n", b"f" * 64, b"refused", b"{}", draw.randbytes(100)]
        try:
            for _ in range(20):
                assert end.receive(draw.choice(parts))[0] == []
        except HandshakeError:
            pass
        assert not end.proved
        assert len(end._rest) <= 356


def test_the_secret_of_a_user_is_made_once_and_kept_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = secret.of_user()
    assert first == secret.of_user() and len(first) == 64
    path = tmp_path / ".paceline" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600 and [each.name for each in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"may be known to other users") as error:
        secret.of_user()
    assert error.value.code == "launch-secret" and first not in str(error.value)


def test_a_secret_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nothing")
    with pytest.raises(LaunchError, match=r"cannot be read or made"):
        secret.of_user()
    path = tmp_path / "secret"
    path.write_text("short\n")
    path.chmod(0o600)
    with environment.patched({"PACELINE_RUN_SECRET_FILE": str(path)}):
        with pytest.raises(LaunchError, match="has a length of 5; expected: 16 characters or more"):
            secret.of_user()
        path.write_bytes(os.urandom(64))
        assert secret.of_user()
        with environment.patched({"PACELINE_RUN_SECRET": SECRET}):
            assert secret.of_user() == SECRET
