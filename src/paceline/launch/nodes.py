"""The launchers of several nodes, joined by connections: what carries the messages of `membership.py`.

Each launcher listens at a port of its own, on the interface by which it reaches the others. All have a connection to the
one that leads; over others they only ask who is there. Nobody is listened to who has not proved to have the run's secret
(`proof.py`); nothing else of the run goes this way. There is no thread: `poll` does what is due, and is called from every
place where the launcher waits.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from paceline.base import env as environment
from paceline.base.errors import ConfigError, LaunchError
from paceline.launch import host, membership_errors, secret
from paceline.launch.connection import Connection
from paceline.launch.launcher import Job
from paceline.launch.membership import Membership
from paceline.launch.messages import Announce, Join, StopMode
from paceline.launch.pod_names import await_main_address
from paceline.launch.rounds import Member, Place, Report, Round, Rules
from paceline.launch.store import Endpoint, StoreLink
from paceline.launch.tls import Tls
from paceline.launch.witness import Seal, Witness

_PATIENCE_S = 300.0
_TICK_S = 0.2
_QUIET_S = 15.0  # whoever waits longer for the other nodes says so once: a wrong address looks like a slow start
_GOODBYE_S = 2.0  # how long to wait at the end for the others to have read the last word
_LINGER_S = 30.0  # a connection closed with what it still held unread would lose the last word
_FEWEST_KEEP_ALIVES = 3
_LONGEST_NAME = 255
_PROVE_S = 5.0  # how long whoever connects may take to prove that it has the secret
_UNPROVED_AT_MOST = 64  # so many may be about it at the same time; the oldest goes for the next


class Nodes:
    """All nodes of a job, as this one's launcher sees them.

    Attributes:
        membership: who takes part.
        secret: what the others must prove that they have.
        reserved_port: keeps a port for the next round's rank 0 from being given to anybody else.
    """

    def __init__(
        self,
        job: Job,
        listener: socket.socket | None,
        membership: Membership,
        secret: str = "",
        store: StoreLink | None = None,
    ) -> None:
        self.job, self.membership, self.secret, self.store = job, membership, secret, store
        self.listener = listener
        self._tls = Tls.of(job.tls) if listener is not None else None
        self.reserved_port: socket.socket | None = None
        self._connections: dict[int, Connection] = {}
        self._incoming = 2  # numbers of incoming connections are even, those of outgoing ones odd
        self._ticked = 0.0
        self._rejected, self._report_at = 0, 1  # the count of strangers at which the next line says so
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if store is not None:
            self._selector.register(store.fileno(), selectors.EVENT_READ, store)

    @classmethod
    def open_for(cls, job: Job) -> Nodes:
        """Gets ready to find the others; finding them goes on in `next`.

        Raises:
            LaunchError: `launch-address`, where no place to ask has a known name; `launch-keep-alive`; `launch-port`;
                `launch-secret`; `launch-store`.
        """
        rules = rules_of(job)
        who = Member(f"{os.getpid()}-{os.urandom(6).hex()}", host.name(), job.procs)
        if rules.most == 1:
            return cls(job, None, Membership(who, rules, True, (), time.monotonic(), time.time()))
        shared = job.secret or secret.of_user()
        if job.store:
            return cls._open_with_store(job, who, rules, shared)
        await_main_address(job, environment.snapshot(), rules.join_timeout_s)
        places = _places(job)
        listener, mine = _listen(job, places)
        node = job.node_rank if job.numbered else -1
        founds = mine == 0 if mine is not None else job.numbered and job.node_rank == 0
        address = places[mine][0] if mine is not None else "127.0.0.1"
        who = replace(who, node=node, address=address, port=listener.getsockname()[1])
        contacts = [place for number, place in enumerate(places) if number != mine]
        return cls(job, listener, Membership(who, rules, founds, contacts, time.monotonic(), time.time()), shared)

    @classmethod
    def _open_with_store(cls, job: Job, who: Member, rules: Rules, shared: str) -> Nodes:
        """Where a store says where the others are, and who founds the run."""
        endpoint = Endpoint.of(job.store, rules.run, dict(job.options))
        seal = Seal(shared, rules.run)
        link = StoreLink(endpoint)
        try:
            link.first_record(seal)
            listener = _listen_towards(_addresses(*endpoint.place))
        except BaseException:
            link.close()
            raise
        address, port = listener.getsockname()[:2]
        who = replace(who, node=job.node_rank if job.numbered else -1, address=address, port=port)
        now = time.monotonic()
        witness = Witness(seal, who.host, lambda: os.urandom(8).hex(), endpoint.name, now)
        rules = replace(rules, store=endpoint.name)
        membership = Membership(who, rules, False, (), now, time.time(), witness)
        return cls(job, listener, membership, shared, link)

    def fileno(self) -> int:
        """Becomes readable when there is something to tend to."""
        return self._selector.fileno()

    @property
    def several(self) -> bool:
        """Whether there may be other nodes."""
        return self.listener is not None

    def next(self, asked_to_end: Callable[[], object]) -> Round | None:
        """Waits for the next round; None where there is none, as all has ended or a signal asks to."""
        silent_until = time.monotonic() + _QUIET_S
        while not asked_to_end():
            self.pause(0.05)
            if self.several and time.monotonic() > silent_until:
                print(f"paceline: {membership_errors.waiting(self.membership)}", file=sys.stderr, flush=True)
                silent_until = math.inf
            begun = self.membership.round_to_start
            if begun is not None:
                self.membership.round_to_start = None
                return begun
            if self.membership.end is not None:
                break
        return None

    def rest(self, report: Report) -> None:
        """All processes of this node have ended."""
        if self.reserved_port is not None:
            self.reserved_port.close()
        self.reserved_port = host.hold_port(0 if self.several else self.job.main_port)
        self.membership.processes_ended(
            replace(report, store_port=self.reserved_port.getsockname()[1]), time.monotonic()
        )
        self._carry_out()

    def leave(self, how: StopMode, why: str) -> None:
        """This node was asked to end."""
        self.membership.drain(how, why, time.monotonic())
        self._carry_out()

    def pause(self, seconds: float) -> None:
        """Waits, and tends to the others meanwhile."""
        if self.several:
            self._selector.select(seconds)
            self.poll()
        elif self.membership.round_to_start is None and self.membership.end is None:
            time.sleep(seconds)

    def poll(self) -> None:
        """Does what is due: connections, messages, signs of life."""
        for event, _ in self._selector.select(0):
            if event.data is None:
                self._accept()
            elif isinstance(event.data, StoreLink):
                self._hear_store(event.data)
            elif event.data.key in self._connections:  # what came before may have ended it
                self._serve(event.data)
        now = time.monotonic()
        if self.several and now - self._ticked >= _TICK_S:
            self._ticked = now
            self.membership.tick(now)
            for connection in list(self._connections.values()):
                if connection.closing_since is not None and now - connection.closing_since > _LINGER_S:
                    self._remove(connection)
                elif connection.is_unproved and now - connection.since > _PROVE_S:
                    self._reject(connection)
        self._carry_out()

    def _hear_store(self, link: StoreLink) -> None:
        """Answers of the store; a client that has ended is started again for the next request."""
        answers, is_there = link.receive()
        for answer in answers:
            if self.membership.store is not None:
                self.membership.store.on_answer(answer.key, answer.value, answer.trouble, time.monotonic())
        if not is_there:
            self._end_client(link)

    def _end_client(self, link: StoreLink) -> None:
        if link.is_open:
            self._selector.unregister(link.fileno())
            link.close()

    def _accept(self) -> None:
        assert self.listener is not None, "only a listener has no connection"
        with suppress(OSError):  # it has hung up already
            sock, (peer, *_) = self.listener.accept()
            unproved = [connection for connection in self._connections.values() if connection.is_unproved]
            if len(unproved) >= _UNPROVED_AT_MOST:
                self._reject(unproved[0])
            connection = Connection(self._incoming, sock, self.secret, False, peer.removeprefix("::ffff:"), self._tls)
            self._incoming += 2
            connection.flush()
            self._add(connection)

    def _add(self, connection: Connection) -> None:
        self._connections[connection.key] = connection
        self._selector.register(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.key in self._connections:
            writes = selectors.EVENT_WRITE * bool(connection.has_unsent or connection.connecting)
            self._selector.modify(connection.sock, selectors.EVENT_READ | writes, connection)

    def _serve(self, connection: Connection) -> None:
        if connection.connecting:
            self._connected(connection)
            return
        connection.flush()
        messages, there = connection.receive()
        for message in messages:
            if connection.closing_since is None:
                # How a launcher is reached is seen best from outside.
                if isinstance(message, Join):
                    message = replace(message, member=replace(message.member, address=connection.peer))
                elif isinstance(message, Announce):
                    message = replace(message, place=(connection.peer, message.place[1]))
                self.membership.on_message(connection.key, message, time.monotonic())
                self._carry_out()
        if there:
            self._watch(connection)
        elif connection.peer and connection.problem:
            self._reject(connection)
        else:
            self._end(connection, connection.problem or "closed")

    def _reject(self, connection: Connection) -> None:
        """Ends a connection that a stranger opened, and says so now and then."""
        self._rejected += 1
        if self._rejected == self._report_at:
            self._report_at *= 10
            port = self.membership.me.port
            text = f"{self._rejected} so far at port {port}, the last from {connection.peer}"
            self.membership.notes.append(f"refused a connection that did not prove this run's secret ({text})")
        self._end(connection, "closed")

    def _connected(self, connection: Connection) -> None:
        error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        connection.connecting = False
        if not error:
            with suppress(OSError):  # a port that nobody has may be met by its own call
                if connection.sock.getsockname() == connection.sock.getpeername():
                    error = errno.ECONNREFUSED
        if error:
            self._end(connection, _how_failed(error))
        else:
            connection.flush()
            self._watch(connection)

    def _end(self, connection: Connection, how: str) -> None:
        self._remove(connection)
        if connection.closing_since is None:
            self.membership.on_closed(connection.key, how, time.monotonic())
            self._carry_out()

    def _remove(self, connection: Connection) -> None:
        if self._connections.pop(connection.key, None) is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _carry_out(self) -> None:
        """Does what the membership asks for."""
        for note in self.membership.notes:
            print(f"paceline: {note}", file=sys.stderr, flush=True)
        self.membership.notes.clear()
        if self.store is not None and self.membership.store is not None:
            requests = self.membership.store.witness.requests
            if requests and self.store.is_stuck:
                self._end_client(self.store)
            if requests and not self.store.is_open:
                self.store.restart()
                self._selector.register(self.store.fileno(), selectors.EVENT_READ, self.store)
            while requests:
                self.store.send(requests.pop(0))
        while self.membership.peers.actions:
            kind, key, *rest = self.membership.peers.actions.pop(0)
            if kind == "open":
                self._open(key, *rest)
            elif key in self._connections and kind == "send":
                connection = self._connections[key]
                if connection.closing_since is None:
                    connection.send(*rest)
                    self._watch(connection)
            elif key in self._connections:
                connection = self._connections[key]
                connection.closing_since = time.monotonic()
                if connection.proved:
                    connection.flush()
                else:  # nothing that waits could ever be read
                    self._remove(connection)

    def _open(self, key: int, place: Place) -> None:
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        connection = Connection(key, socket.socket(family, socket.SOCK_STREAM), self.secret, True, tls=self._tls)
        code = connection.sock.connect_ex(place)
        if code in (0, errno.EINPROGRESS):
            self._add(connection)
            return
        connection.sock.close()
        self.membership.on_closed(key, _how_failed(code), time.monotonic())

    def leave_in_child(self) -> None:
        """In a forked process: drops this end of everything, without a word to the others."""
        for connection in self._connections.values():
            connection.sock.close()
        for sock in (self.listener, self.reserved_port):
            if sock is not None:
                sock.close()
        if self.store is not None:
            self.store.leave_in_child()
        self._selector.close()

    def close(self) -> None:
        """Says good-bye, and waits a moment until the others have heard it."""
        self.membership.leave()
        self._carry_out()
        for connection in list(self._connections.values()):
            self.membership.peers.actions.append(("close", connection.key))
        self._carry_out()
        deadline = time.monotonic() + _GOODBYE_S
        while not self._has_left() and time.monotonic() < deadline:
            for event, _ in self._selector.select(0.1):
                if isinstance(event.data, StoreLink):
                    self._hear_store(event.data)
                elif event.data is not None:
                    event.data.flush()
                    if not event.data.receive()[1]:
                        self._remove(event.data)
                    else:
                        self._watch(event.data)
        if self.store is not None:
            self._end_client(self.store)
        self.leave_in_child()
        self._connections.clear()

    def _has_left(self) -> bool:
        """Whether the others have read the last word, and the store knows no place of this launcher any more."""
        has_left_store = self.membership.store is None or self.membership.store.leave(time.monotonic())
        self._carry_out()
        return has_left_store and not self._connections


def _how_failed(code: int) -> str:
    """How a call has failed, for `Membership.on_closed`: only a refusal comes from the host itself, and shows that no
    launcher is there."""
    return "refused" if code == errno.ECONNREFUSED else "silent"


def rules_of(job: Job) -> Rules:
    """What the launchers must agree on, and how patient they are.

    Raises:
        LaunchError: `launch-keep-alive`.
        ConfigError: `config-value`, where the run's name is too long for a message.
    """
    options = job.options
    run = options.get("run_id", "paceline")
    if len(run) > _LONGEST_NAME:
        raise ConfigError(
            "config-value",
            f"the name of the run has {len(run)} characters.",
            why=f"--rdzv-conf run_id={run[:40]}...; expected: at most {_LONGEST_NAME}",
            fix="give it a shorter name",
        )
    heartbeat_s = float(options.get("keep_alive_interval", 1))
    attempts = int(options.get("keep_alive_max_attempt", 5))
    if attempts < _FEWEST_KEEP_ALIVES:
        raise LaunchError(
            "launch-keep-alive",
            f"keep_alive_max_attempt={attempts} would take a node that is late by a moment for lost.",
            why="--rdzv-conf",
            fix=f"say {_FEWEST_KEEP_ALIVES} or more, with a shorter keep_alive_interval",
        )
    join_timeout_s = options.get("timeout", options.get("join_timeout", _PATIENCE_S))
    return Rules(
        least=job.least or job.nodes,
        most=job.nodes,
        max_restarts=job.max_restarts,
        run=run,
        heartbeat_s=heartbeat_s,
        silence_limit_s=heartbeat_s * attempts,
        join_timeout_s=float(join_timeout_s),
        last_call_timeout_s=float(options.get("last_call_timeout", 2)),
        grace_s=job.grace_s,
    )


def _places(job: Job) -> list[Place]:
    """Where a run may be found: what --main-address names, as numbers.

    Raises:
        LaunchError: `launch-address`, where no name is known.
    """
    places: list[Place] = []
    problems: list[str] = []
    for text in job.main_address.split(","):
        name, port = text, ""
        if text.count(":") == 1:  # more of them are an IPv6 address
            name, port = text.split(":")
        try:
            places += _addresses(name, int(port or job.main_port))
        except (OSError, ValueError) as error:
            problems.append(f"{text}: {str(error.args[-1]).lower()}")
    if not places:
        raise LaunchError(
            "launch-address", "node 0 has no such name.", f"--main-address {'; '.join(problems)}", "give its IP address"
        )
    return places


def _addresses(name: str, port: int) -> list[Place]:
    """One address of a host, IPv4 where it has one.

    Raises:
        OSError: it has none.
    """
    rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    family_first = min(rows, key=lambda row: row[0] != socket.AF_INET)
    address = family_first[4]
    return [(str(address[0]), int(address[1]))]


def _listen(job: Job, places: list[Place]) -> tuple[socket.socket, int | None]:
    """Where this launcher listens, and which of the places that is, if any."""
    mine = list(range(len(places)))
    if job.numbered:
        # The places are those of the first nodes; one alone is node 0's.
        mine = [job.node_rank] if job.node_rank < len(places) else []
    for number in mine:
        address, port = places[number]
        listener = _bind(address, port, anywhere=job.numbered)
        if listener is not None:
            return listener, number
    return _listen_towards(places), None


def _listen_towards(places: list[Place]) -> socket.socket:
    """A socket at a free port of the address by which this host reaches the first place that it has a way to."""
    for address, port in places:
        own = host.address_towards(address, port or 9)
        if own:
            with suppress(OSError):
                return host.listen_at(own, 0)
    listener = host.hold_port(0)  # no network leads there yet
    listener.listen(128)
    return listener


def _bind(address: str, port: int, anywhere: bool) -> socket.socket | None:
    """A socket at a place, where that is on this host and nobody listens there.

    Args:
        address, port: the place.
        anywhere: listen on all interfaces where the address is none of this host's (it may be one that is forwarded here).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as test:
        try:
            test.bind((address, 0))
            here = address != "127.0.1.1"  # as Debian calls the host itself, for no other host to use
        except OSError:
            if not anywhere:
                return None
            here = False
    try:
        if here:
            return host.listen_at(address, port)
        sock = host.hold_port(port)
    except OSError:
        return None
    try:
        sock.listen(128)
    except OSError:
        sock.close()
        return None
    return sock
