"""The page's server: who may read, what is sent, and that nobody holds up another."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import time

import pytest

from paceline.base.errors import LaunchError
from paceline_lens.watch.page_files import FILES
from paceline_lens.watch.server import PageServer


class Run:
    """A run of which the tests change what is to be shown."""

    def __init__(self) -> None:
        self.shown: dict[str, object] = {}
        self.stacks = 0

    def write_stacks(self) -> None:
        self.stacks += 1


@pytest.fixture(scope="module")
def of_module():
    """A run and the server of its page."""
    run = Run()
    with PageServer(lambda names: run.shown, interval_s=0.02, write_stacks=run.write_stacks) as server:
        yield run, server


@pytest.fixture
def run(of_module) -> Run:
    return of_module[0]


@pytest.fixture
def server(of_module) -> PageServer:
    run, server = of_module
    run.shown = {}  # pages of the next test would be sent the megabytes of this one
    return server


def ask(server, path: str, method: str = "GET", headers: dict[str, str] | None = None):
    """Status, headers and body of a request; `path` is below the root."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


class Stream:
    """A browser's connection to the events, as bytes."""

    def __init__(self, server, last: str = "") -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        head = f"GET /{server.token}/events HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Last-Event-ID: {last}\r\n" if last else ""
        self.socket.sendall(f"{head}\r\n".encode())
        self.file = self.socket.makefile("rb")
        while self.file.readline().strip():
            pass

    def next(self) -> tuple[str, str, dict[tuple[str, ...], object]]:
        """Id, name and content of the next event."""
        fields = {}
        while "data" not in fields:
            line = self.file.readline().decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
        parts = {tuple(path): value for path, value in json.loads(fields["data"])}
        return fields["id"], fields["event"], parts

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/events", "/favicon.ico", "/TOKEN", "/TOKENx/", "/%C3%A9/", "//"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_without_the_token_there_is_not_a_word(server, path, method) -> None:
    status, headers, body = ask(server, path.replace("TOKEN", server.token), method)
    assert (status, body) == (403, b"")
    assert "Server" not in headers and "paceline" not in str(headers).lower()


def test_another_host_name_is_refused(server) -> None:
    for host, status in {
        "evil.example": 403,
        "127.0.0.1.evil.example:80": 403,
        "localhost:9999": 200,
        "[::1]:1": 200,
    }.items():
        assert ask(server, f"/{server.token}/", headers={"Host": host})[0] == status, host


def test_every_file_of_the_page_is_served_with_a_strict_policy(server) -> None:
    for name in ("", *FILES):
        status, headers, body = ask(server, f"/{server.token}/{name}")
        assert status == 200 and body
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
        assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("name", ["../server.py", "%2e%2e/server.py", "server.py", "page/", "index.html/"])
def test_no_other_file_is_served(server, name) -> None:
    assert ask(server, f"/{server.token}/{name}")[0] == 404


def test_other_methods_are_refused_without_a_word(server) -> None:
    status, _, body = ask(server, f"/{server.token}/", "DELETE")
    assert (status, body) == (501, b"")


def test_a_page_is_told_what_changes_and_goes_on_where_it_was(server, run) -> None:
    run.shown = {"title": "digits", "names": ["loss"], "series": {"loss": [[1, 0.5]]}}
    page = Stream(server)
    seen, event, parts = page.next()
    assert event == "snapshot" and parts["title",] == "digits" and parts["page", "stacks"] is True
    run.shown = {**run.shown, "title": "letters"}
    seen, event, parts = page.next()
    assert (event, parts) == ("change", {("title",): "letters"})
    page.close()
    run.shown = {**run.shown, "title": "words"}
    again = Stream(server, last=seen)
    assert again.next()[1:] == ("change", {("title",): "words"})
    again.close()


def test_a_slow_page_holds_up_nobody(server, run) -> None:
    slow = Stream(server)  # it reads no event
    quick = Stream(server)
    for number in range(10):
        run.shown = {"names": ["x" * 4_000_000 + str(number)]}
        # Held up by the slow one, it would hear nothing for as long as its socket waits.
        while not quick.next()[2].get(("names",), [""])[0].endswith(str(number)):
            pass
    # The slow one then skips what it missed: nothing was kept for it but what the system's own buffers hold.
    events = 1
    while not slow.next()[2].get(("names",), [""])[0].endswith("9"):
        events += 1
    assert events < 8
    slow.close()
    quick.close()


def test_many_pages_get_the_same_and_too_many_are_turned_away(server) -> None:
    pages = [Stream(server) for _ in range(64)]
    assert {page.next()[1] for page in pages} == {"snapshot"}
    assert ask(server, f"/{server.token}/events")[0] == 503
    assert ask(server, f"/{server.token}/")[0] == 200
    for page in pages:
        page.close()


def test_the_button_asks_for_stacks_once_in_a_while_and_for_our_own_page_alone(server, run) -> None:
    path = f"/{server.token}/stacks"
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    for headers in ({}, {"Origin": "null"}, {"Origin": "http://evil.example"}, own | {"Origin": "http://localhost:1"}):
        assert ask(server, path, "POST", headers)[0] == 403
    assert ask(server, path, "GET", own)[0] == 404
    assert ask(server, "/wrong/stacks", "POST", own)[0] == 403
    assert run.stacks == 0
    assert ask(server, path, "POST", own)[0] == 202
    assert ask(server, path, "POST", own)[0] == 429
    assert run.stacks == 1


def test_a_page_beside_the_run_writes_nothing(run) -> None:
    with PageServer(lambda names: run.shown, interval_s=0.02) as server:
        own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
        assert ask(server, f"/{server.token}/stacks", "POST", own)[0] == 404


def test_a_port_that_is_taken(server, run) -> None:
    with pytest.raises(LaunchError, match=str(server.port)) as caught:
        PageServer(lambda names: run.shown, port=server.port)
    assert caught.value.code == "watch-port"
    with PageServer(lambda names: run.shown) as other:
        assert other.port != server.port
    with pytest.raises(LaunchError, match="70000"):
        PageServer(lambda names: run.shown, port=70000)


def test_a_browser_that_leaves_is_no_event(server, caplog) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            page = Stream(server)
            page.next()
            page.close()
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"GET /")
        half.close()
        time.sleep(0.2)
    assert not caplog.records
