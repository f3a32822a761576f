"""`PageServer` serves the page of one run to a browser on this machine.

    GET  /TOKEN/           the page
    GET  /TOKEN/page.css   and the other files that it is made of
    GET  /TOKEN/events     server-sent events: a `snapshot`, then a `change` whenever something is new; `?name=loss&name=lr`
                           asks for the series of these names
    POST /TOKEN/stacks     asks the run for the stacks of all ranks; only where the run's own launcher serves the page

A client that knows the token may read; every other one gets status 403 with an empty body. Requests for another host name are
refused too, so that a web site whose name resolves to the loopback address cannot read the page (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.base.errors import LaunchError
from paceline.base.log import logger
from paceline_lens.watch.page_files import FILES, page_file
from paceline_lens.watch.publication import Publication, Update

FIRST_PORT = 8470  # the first port to try if the user names none
_TRIED_PORTS = 20
_LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = (_LOOPBACK, "localhost", "::1")

_MOST_CONNECTIONS = 128
_MOST_STREAMS = 64
_REQUEST_S = 10  # a client that takes longer to send its request is disconnected
_WRITE_S = 20  # a client that reads nothing for so long is disconnected too; its browser connects again
_KEEP_ALIVE_S = 15  # after so long without news, a stream writes a comment, to notice a lost browser
_STACKS_S = 5  # the least time between two requests for stacks

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}


class PageServer:
    """Serves the page of one run, in threads of its own, until it is closed.

    Args:
        snapshot: returns what is shown (`RunView.snapshot`), with the series of the given names.
        port: the port to listen on, on this machine alone, since the page is not encrypted; None takes the first free one
            from 8470 on.
        write_stacks: asks the run for the stacks of all ranks; None if this process cannot.
        token: the secret word in the URL; None draws one at random.
        interval_s: seconds between two updates.

    Attributes:
        url: the URL of the page, with its token.
        port: the port on which it listens.

    Raises:
        LaunchError: `watch-port`, if it cannot listen there.
    """

    def __init__(
        self,
        snapshot: Callable[[Sequence[str] | None], Mapping[str, Any]],
        *,
        port: int | None = None,
        write_stacks: Callable[[], None] | None = None,
        token: str | None = None,
        interval_s: float = 1.0,
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.write_stacks = write_stacks
        self.closing = threading.Event()
        self.streams = threading.BoundedSemaphore(_MOST_STREAMS)
        self._next_stacks = 0.0
        self._stacks_lock = threading.Lock()
        abilities = {"stacks": write_stacks is not None, "live": True}
        self.publication = Publication(lambda names: {**snapshot(names), "page": abilities}, interval_s)
        self._listener = _listen(self, port)
        self.port = int(self._listener.server_address[1])
        self.url = f"http://{_LOOPBACK}:{self.port}/{self.token}/"
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.25}, name="paceline-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends all streams and stops listening."""
        self.closing.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask_for_stacks(self) -> bool:
        """Asks the run for its stacks; returns False if that was done a moment ago."""
        assert self.write_stacks is not None
        with self._stacks_lock:
            now = time.monotonic()
            if now < self._next_stacks:
                return False
            self._next_stacks = now + _STACKS_S
        self.write_stacks()
        return True


class _PageListener(ThreadingHTTPServer):
    """Gives each connection a thread, and refuses connections above a limit."""

    daemon_threads = True
    block_on_close = False  # a thread that waits for a slow client ends by itself
    request_queue_size = 64

    def __init__(self, port: int, page: PageServer) -> None:
        self.page = page
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__((_LOOPBACK, port), _PageRequest)

    def server_bind(self) -> None:
        # The method of `HTTPServer` looks up the host's name, which can take seconds.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), OSError):
            return  # the browser has gone
        logger("watch").exception("a request to the page failed")


class _PageRequest(BaseHTTPRequestHandler):
    """One request, of which the token is checked before anything else."""

    server: _PageListener
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        name = self._permitted()
        if name is None:
            return
        if name == "events":
            self._stream()
        elif name in FILES or name == "":
            self._send_file(name or "index.html")
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        if self._permitted() is not None:
            self._answer(HTTPStatus.OK)

    def do_POST(self) -> None:
        name = self._permitted()
        page = self.server.page
        if name is None:
            return
        if name != "stacks" or page.write_stacks is None:
            self._answer(HTTPStatus.NOT_FOUND)
        elif not self._from_our_own_page():
            self._answer(HTTPStatus.FORBIDDEN)
        else:
            self._answer(HTTPStatus.ACCEPTED if page.ask_for_stacks() else HTTPStatus.TOO_MANY_REQUESTS)

    def _permitted(self) -> str | None:
        """Returns the path below the token; None if the token or the host is wrong, after it has sent the refusal."""
        # `compare_digest` takes the same time for every wrong token, so that times do not reveal how much of it was right.
        token, separator, name = urlsplit(self.path).path.removeprefix("/").partition("/")
        right_token = hmac.compare_digest(token.encode(), self.server.page.token.encode())
        host_name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if right_token and separator and host_name in _LOOPBACK_NAMES:
            return name
        self._answer(HTTPStatus.FORBIDDEN)
        return None

    def _from_our_own_page(self) -> bool:
        """Returns whether the browser says that our own page, and not that of another site, sends this request."""
        origin = self.headers.get("Origin", "")
        return origin == f"http://{self.headers.get('Host', '')}"

    def _send_file(self, name: str) -> None:
        body = page_file(name).encode()
        suffix = name[name.rindex(".") :]
        self._begin(HTTPStatus.OK, f"{_TYPES[suffix]}; charset=utf-8", len(body))
        self.wfile.write(body)

    def _stream(self) -> None:
        streams = self.server.page.streams
        if not streams.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self._write_events()
        finally:
            streams.release()

    def _write_events(self) -> None:
        """Sends news as long as the browser reads. A slow browser gets fewer and larger updates."""
        self.connection.settimeout(_WRITE_S)
        self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8", None)
        self.wfile.write(b"retry: 2000\n\n")
        names = parse_qs(urlsplit(self.path).query).get("name", ())
        with self.server.page.publication.page(names) as news:
            self._write_news(news)

    def _write_news(self, news: Callable[[str], Update | None]) -> None:
        page = self.server.page
        seen = self.headers.get("Last-Event-ID", "")
        quiet_since = time.monotonic()
        with selectors.DefaultSelector() as browser:
            browser.register(self.connection, selectors.EVENT_READ)
            while not page.closing.is_set():
                update = news(seen)
                if update is not None:
                    self.wfile.write(_event(update))
                    seen = update.id
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > _KEEP_ALIVE_S:
                    self.wfile.write(b": still here\n\n")
                    quiet_since = time.monotonic()
                # A browser sends nothing after its request, so that a readable connection is one that was closed.
                if browser.select(page.publication.interval_s):
                    return

    def _answer(self, status: HTTPStatus) -> None:
        """Sends a status with an empty body."""
        self._begin(status, None, 0)

    def _begin(self, status: HTTPStatus, content_type: str | None, length: int | None) -> None:
        self.close_connection = True
        self.send_response_only(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if content_type is not None:
            self.send_header("Content-Type", content_type)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        # The base class calls this for requests that it cannot parse, and for methods that this class does not have.
        self._answer(HTTPStatus(code))

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a request is no event of the run


def _event(update: Update) -> bytes:
    name = "snapshot" if update.whole else "change"
    return f"id: {update.id}\nevent: {name}\ndata: {update.data}\n\n".encode()


def _listen(page: PageServer, port: int | None) -> _PageListener:
    """Listens on the given port or, without one, on the first free port of a range; after that on any free port."""
    tried = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + _TRIED_PORTS), 0]
    problem: OSError | None = None
    for candidate in tried:
        try:
            return _PageListener(candidate, page)
        except (OSError, OverflowError) as error:
            problem = error if isinstance(error, OSError) else OSError(str(error))
    assert problem is not None
    raise LaunchError(
        "watch-port",
        f"the page of the run cannot be served at {_LOOPBACK}, port {tried[0]}.",
        why=problem.strerror or str(problem),
        fix="name another port, or none: then the first free one is taken",
    ) from problem
