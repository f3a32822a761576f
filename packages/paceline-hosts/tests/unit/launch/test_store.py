"""The way to a store: its URL, the client's process, and a store that answers, refuses, or is something else."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.base.errors import ConfigError, LaunchError
from paceline_hosts.membership.witness import Record, RecordSigner, StoreRequest
from paceline_hosts.network import store_link as stores
from paceline_hosts.network.store_client import Etcd, answer_to, store_of
from paceline_hosts.network.store_link import Endpoint, StoreLink

SECRET = "0123456789abcdef"
SIGNER = RecordSigner(SECRET, "paceline")
RECORD = Record("a life", 0, "a", (("10.0.0.1", 1),))


class Gateway(BaseHTTPRequestHandler):
    """etcd's JSON gateway, as far as it is used; `server.answer` replaces what it says."""

    server: Any

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.answer or self._answer(said)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, said: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        values = self.server.values
        if self.path == "/v3/auth/authenticate":
            if said != {"name": "user", "password": "right"}:
                return 400, {"error": "authentication failed, invalid user ID or password"}
            return 200, {"token": "a token"}
        if self.server.asks and self.headers["Authorization"] != "a token":
            return 400, {"error": "etcdserver: user name is empty"}
        if self.path == "/v3/kv/range":
            return 200, self._rows(said["key"])
        (condition,) = said["compare"]
        key, value = condition["key"], values.get(condition["key"])
        if condition["target"] == "CREATE":
            holds = value is None
        else:
            holds = value == condition["value"]
        if not holds:
            return 200, {"responses": [{"response_range": self._rows(key)}]}
        values.pop(key, None)
        if "request_put" in said["success"][0]:
            values[key] = said["success"][0]["request_put"]["value"]
        return 200, {"succeeded": True}

    def _rows(self, key: str) -> dict[str, Any]:
        value = self.server.values.get(key)
        return {"kvs": [{"value": value}]} if value is not None else {}


@pytest.fixture
def gateway() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.values, server.answer, server.asks = {}, None, False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def endpoint(gateway: Any, login: str = "") -> Endpoint:
    return Endpoint.of(f"etcd://{login}127.0.0.1:{gateway.server_address[1]}", "paceline", {})


def test_urls() -> None:
    found = Endpoint.of("etcd://a,b:1,[::1]:2", "x", {})
    assert (found.kind, found.hosts, found.key) == ("etcd", (("a", 2379), ("b", 1), ("::1", 2)), "paceline/x")
    assert found.name == "etcd://[::1]:2,a:2379,b:1"
    assert Endpoint.of("c10d://s", "x", {}).place == ("s", 29400)
    secret = Endpoint.of("etcds://user:p%40ss@a", "x", {})
    assert (secret.user, secret.password, secret.name) == ("user", "p@ss", "etcds://a:2379")
    assert "p@ss" not in repr(secret)


def test_a_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STORE_PASSWORD", "hidden")
    assert Endpoint.of("etcd://user@a", "x", {}).password == "hidden"
    assert Endpoint.of("etcd://a", "x", {}).password == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("redis://a", "redis:// is not a kind of store"),
        ("etcd://a:b", "a:b is not a host and port"),
        ("etcd://a:99999", "a:99999 is not a host and port"),
        ("etcd://a,", "'nothing' is not a host and port"),
        ("etcd://a/b", "'a/b' is not a host and port"),
        ("c10d://user:x@a", "neither user nor password"),
        ("c10d://a,b", "c10d:// has one host"),
        ("etcds://a", "cacert=/nowhere cannot be read"),
        ("etcd://a", "cacert (--rdzv-conf) needs TLS: etcds://"),
    ],
)
def test_urls_that_name_no_store(text: str, why: str) -> None:
    options = {"cacert": "/nowhere"} if "cacert" in why else {}
    with pytest.raises(ConfigError, match="launch-store") as error:
        Endpoint.of(text, "x", options)
    assert why in str(error.value)
    assert ":x@" not in str(error.value)


def test_compare_and_swap(gateway: Any) -> None:
    host, port = gateway.server_address
    store = Etcd([("127.0.0.1", 1), (host, port)], "a key", "", "", None)
    assert store.read() is None
    assert store.swap("old", "new") is None
    assert store.swap(None, "new") == "new"
    assert store.swap(None, "newer") == "new"
    assert store.swap("new", "ä\n\x00") == "ä\n\x00"
    assert store.read() == "ä\n\x00"
    assert store.swap("ä\n\x00", None) is None
    assert gateway.values == {}


def test_users(gateway: Any) -> None:
    gateway.asks = True
    for login, trouble in (
        ("user:right@", ""),
        ("user:wrong@", "authentication failed, invalid user ID or password"),
        ("", "etcdserver: user name is empty"),
    ):
        place = endpoint(gateway, login)
        store = store_of(vars(place))
        answer = answer_to(store, {"key": 1, "swaps": False})
        assert (answer["trouble"], answer["refused"]) == (trouble, bool(trouble))


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"garbage"), (200, b""), (200, b"[]"), (200, b"5"), (200, b'{"kvs": 5}'), (200, b'{"kvs": [5]}'),
        (200, b'{"kvs": [{"value": "not base 64"}]}'), (200, b'{"kvs": [{"value": 5}]}'), (200, b"x" * 3_000_000),
        (200, b'{"responses": []}'), (404, b"not found"), (500, b'{"error": 5}'), (302, b""), (200, b"[" * 100_000),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_etcd(gateway: Any, answer: tuple[int, bytes]) -> None:
    gateway.answer = answer
    store = store_of(vars(endpoint(gateway)))
    for swaps in (False, True):
        found = answer_to(store, {"key": 1, "swaps": swaps, "old": "x", "new": "y"})
        assert found["trouble"] or found["value"] is None
        json.dumps(found)


def test_the_process_that_asks(gateway: Any) -> None:
    link = StoreLink(endpoint(gateway))
    try:
        assert link.first_record(SIGNER) is None
        link.send(StoreRequest(7, True, None, SIGNER.sign(RECORD)))
        deadline = time.monotonic() + 20
        answers: list[Any] = []
        while not answers and time.monotonic() < deadline:
            answers, is_there = link.receive()
            assert is_there
            time.sleep(0.01)
        assert answers == [(7, SIGNER.sign(RECORD), "", False)]
        assert link.first_record(SIGNER) == RECORD
        with pytest.raises(LaunchError, match="launch-secret") as error:
            link.first_record(RecordSigner("another secret of 16", "paceline"))
        assert "another secret than this launcher" in str(error.value)
        assert link._process is not None
        link._process.kill()
        link._process.wait()
        assert link.receive()[1] is False
        link.restart()
        assert link.first_record(SIGNER) == RECORD
    finally:
        link.close()
    stored = base64.b64decode(next(iter(gateway.values.values()))).decode()
    assert SECRET not in stored


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CONNECT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(stores, "_RETRY_S", 3.0)
    link = StoreLink(Endpoint.of("etcd://127.0.0.1:1", "paceline", {}))
    try:
        with pytest.raises(LaunchError, match="launch-store") as error:
            link.first_record(SIGNER)
        assert "127.0.0.1:1: connection refused" in str(error.value)
    finally:
        link.close()
