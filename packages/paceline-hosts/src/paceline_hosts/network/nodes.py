"""The connections between the launchers of several nodes, which carry the messages of `membership/`.

Each launcher listens at a port of its own, on the interface by which it reaches the others. Every launcher keeps one
connection to the leader; other connections are short, and only ask who is there. A message is read only after the other end
has proved that it has the secret of the run (`handshake.py`). Stacks, and lines of a watched run, travel this way too; tensors
do not.

There is no thread, because the launcher forks its workers. `poll` does what is due, and every place where the launcher waits
calls it.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.base import env as environment
from paceline.base.errors import ConfigError, LaunchError
from paceline.base.terminal import say
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.rounds import End, Member, Place, Report, Round, StopMode
from paceline_hosts.journals import JournalExchange
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Announce, Join
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from paceline_hosts.membership.witness import RecordSigner, Witness
from paceline_hosts.network import secret
from paceline_hosts.network.addresses import await_main_address, listen, listen_towards, main_places, resolve
from paceline_hosts.network.connection import Connection
from paceline_hosts.network.store_link import Endpoint, StoreLink
from paceline_hosts.network.tls import Tls
from paceline_hosts.stack_exchange import StackExchange

_DEFAULT_JOIN_TIMEOUT_S = 300.0
_TICK_S = 0.2
# A launcher that has waited for the other nodes for this long prints so once: a wrong address looks like a slow start.
_QUIET_S = 15.0
# How long a launcher that ends waits until the others have read its last messages.
_GOODBYE_S = 2.0
# How long a connection stays open after its last message was sent. Closing a socket that holds unread data resets the
# connection, and the other end would lose that message.
_LINGER_S = 30.0
_FEWEST_KEEP_ALIVES = 3
_LONGEST_NAME = 255
_HANDSHAKE_TIMEOUT_S = 5.0
# More connections than this may not be in their handshake at the same time: the oldest one is closed for the next.
_MAX_HANDSHAKES = 64


class NodesByMembership:
    """The nodes of a job that find each other: an implementation of `Nodes` of `launch/nodes.py`.

    Args:
        job: the job.
        listener: the socket at which this launcher listens.
        membership: the state machine that decides who takes part. This class carries its messages.
        secret: the secret that the others must prove to have.
        store: the process that speaks to the store; None where the run uses none.

    Attributes:
        several: True; the others may join later.
        stacks: the exchange of stacks with the other launchers.
        reserved_port: a socket that reserves a port on this host for rank 0 of the next round.
    """

    several = True

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        membership: Membership,
        secret: str = "",
        store: StoreLink | None = None,
    ) -> None:
        self.job = job
        self.listener = listener
        self.membership = membership
        self.secret = secret
        self.store = store
        self.stacks = StackExchange(membership, self.pause)
        self._journals = JournalExchange(membership)
        self._tls = Tls.of(job.tls)
        self.reserved_port: socket.socket | None = None
        self._connections: dict[int, Connection] = {}
        # Connections that others open have even numbers; `Peers.ask` gives odd ones to those that it opens.
        self._next_incoming_key = 2
        self._last_tick = 0.0
        self._num_rejected = 0
        # A line is printed for the 1st, 10th, 100th, ... rejected connection, so that a port scan does not fill the log.
        self._next_rejection_report = 1
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if store is not None:
            self._selector.register(store.fileno(), selectors.EVENT_READ, store)

    @classmethod
    def open_for(cls, job: Job) -> NodesByMembership:
        """Opens the socket at which this launcher listens. The search for the others begins with the first `poll`.

        Raises:
            LaunchError: `launch-address`, where no name of `--main-address` can be resolved; `launch-keep-alive`;
                `launch-secret`; `launch-store`.
        """
        rules = rules_of(job)
        me = Member(f"{os.getpid()}-{os.urandom(6).hex()}", host.name(), job.procs)
        run_secret = job.secret or secret.of_user()
        me = replace(me, node=job.node_rank if job.numbered else -1)
        if job.store:
            return cls._open_with_store(job, me, rules, run_secret)
        await_main_address(job, environment.snapshot(), rules.join_timeout_s)
        places = main_places(job)
        listener, own_index = listen(job, places)
        address = "127.0.0.1"
        is_founder = job.numbered and job.node_rank == 0
        if own_index is not None:
            address = places[own_index][0]
            is_founder = own_index == 0
        me = replace(me, address=address, port=listener.getsockname()[1])
        contacts = [place for index, place in enumerate(places) if index != own_index]
        now = time.monotonic()
        state = LauncherState(me, rules, is_founder, contacts, now, time.time())
        return cls(job, listener, Membership(state, now), run_secret)

    @classmethod
    def _open_with_store(cls, job: Job, me: Member, rules: Rules, run_secret: str) -> NodesByMembership:
        """As `open_for`, for a run whose store says where the others are and who founds the run."""
        endpoint = Endpoint.of(job.store, rules.run, dict(job.options))
        signer = RecordSigner(run_secret, rules.run)
        link = StoreLink(endpoint)
        try:
            link.first_record(signer)
            listener = listen_towards([resolve(*endpoint.place)])
        except BaseException:
            link.close()
            raise
        address, port = listener.getsockname()[:2]
        me = replace(me, address=address, port=port)
        now = time.monotonic()
        witness = Witness(signer, me.host, lambda: os.urandom(8).hex(), endpoint.name, now)
        rules = replace(rules, store=endpoint.name)
        state = LauncherState(me, rules, False, (), now, time.time(), witness)
        return cls(job, listener, Membership(state, now), run_secret, link)

    def fileno(self) -> int:
        """A file descriptor that becomes readable when `poll` has something to do."""
        return self._selector.fileno()

    @property
    def end(self) -> End | None:
        """How the run has ended; None while it goes on."""
        return self.membership.state.end

    @property
    def stop_request(self) -> tuple[StopMode, str] | None:
        """How and why the processes of this node must be stopped; None while they may run."""
        return self.membership.state.stop_request

    @property
    def leads(self) -> bool:
        """Whether this launcher decides for all nodes."""
        return isinstance(self.membership.role, Leadership)

    def index_in(self, decided: Round) -> int:
        """Returns the number of this node in a round."""
        return decided.node_of[self.membership.state.me.id]

    def address_of_rank_0(self, decided: Round) -> str:
        """Returns the address at which the processes of this node reach rank 0.

        If the launcher on the host of rank 0 leads, the others use the address at which they reach that launcher: the address
        that a host has for itself may mean another host elsewhere (127.0.1.1).
        """
        first = decided.members[0]
        if first.id == self.membership.leader_id:
            return self.membership.state.known_members[first.id].address
        return first.address

    def record_into(self, folder: Path) -> None:
        """Sends the leader what this node records there, where hosts do not share the folder."""
        self._journals.open(folder)

    def next(self, asked_to_end: Callable[[], object]) -> Round | None:
        """Waits for the next round; returns None where the run has ended or `asked_to_end` returns true."""
        silent_until = time.monotonic() + _QUIET_S
        while not asked_to_end():
            self.pause(0.05)
            if time.monotonic() > silent_until:
                say(self.membership.waiting_for())
                silent_until = math.inf
            begun = self.membership.state.take_round()
            if begun is not None:
                return begun
            if self.membership.state.end is not None:
                break
        return None

    def processes_ended(self, report: Report) -> None:
        """Reports that all processes of this node have ended, or, before the first round, that it is ready to start."""
        # Before the leader hears that these processes have ended, which may end the run.
        self._journals.send_rest(is_final=False)
        if self.reserved_port is not None:
            self.reserved_port.close()
        self.reserved_port = host.hold_port(0)
        port = self.reserved_port.getsockname()[1]
        self.membership.processes_ended(replace(report, store_port=port), time.monotonic())
        self._carry_out()

    def leave(self, how: StopMode, why: str) -> None:
        """Tells the others that this node was asked to end."""
        self.membership.drain(how, why, time.monotonic())
        self._carry_out()

    def pause(self, seconds: float) -> None:
        """Waits for some seconds, or less; messages are served meanwhile."""
        self._selector.select(seconds)
        self._serve_due()

    def poll(self) -> None:
        """Serves connections, messages, heartbeats, timeouts and journals that are due; does not wait."""
        self._serve_due()
        self._journals.poll()

    def _serve_due(self) -> None:
        for event, _ in self._selector.select(0):
            if event.data is None:
                self._accept()
            elif isinstance(event.data, StoreLink):
                self._receive_from_store(event.data)
            elif event.data.key in self._connections:  # an event before this one may have closed it
                self._serve(event.data)
        now = time.monotonic()
        if now - self._last_tick >= _TICK_S:
            self._last_tick = now
            self.membership.tick(now)
            self._close_late(now)
        self._carry_out()

    def _close_late(self, now: float) -> None:
        """Closes connections that have sent their last message, and those whose handshake takes too long."""
        for connection in list(self._connections.values()):
            if connection.closing_since is not None and now - connection.closing_since > _LINGER_S:
                self._remove(connection)
            elif connection.is_in_handshake and now - connection.since > _HANDSHAKE_TIMEOUT_S:
                self._reject(connection)

    def _receive_from_store(self, link: StoreLink) -> None:
        """Takes in answers of the store. A client that has ended is started again for the next request."""
        answers, is_running = link.receive()
        for answer in answers:
            self.membership.on_store_answer(answer.key, answer.value, answer.trouble, time.monotonic())
        if not is_running:
            self._end_client(link)

    def _end_client(self, link: StoreLink) -> None:
        if link.is_open:
            self._selector.unregister(link.fileno())
            link.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the caller has closed the connection already
            sock, (peer, *_) = self.listener.accept()
            in_handshake = [connection for connection in self._connections.values() if connection.is_in_handshake]
            if len(in_handshake) >= _MAX_HANDSHAKES:
                self._reject(in_handshake[0])
            connection = Connection(
                self._next_incoming_key, sock, self.secret, False, peer.removeprefix("::ffff:"), self._tls
            )
            self._next_incoming_key += 2
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
        messages, is_open = connection.receive()
        for message in messages:
            if connection.closing_since is None:
                # A launcher does not know by which address others reach it: the address that it calls from counts.
                if isinstance(message, Join):
                    message = replace(message, member=replace(message.member, address=connection.peer))
                elif isinstance(message, Announce):
                    message = replace(message, place=(connection.peer, message.place[1]))
                self.membership.on_message(connection.key, message, time.monotonic())
                self._carry_out()
        if is_open:
            self._watch(connection)
        elif connection.peer and connection.problem:
            self._reject(connection)
        else:
            self._end(connection, connection.problem or "closed")

    def _reject(self, connection: Connection) -> None:
        """Closes a connection whose other end did not prove the secret, and prints a line now and then."""
        self._num_rejected += 1
        if self._num_rejected == self._next_rejection_report:
            self._next_rejection_report *= 10
            port = self.membership.state.me.port
            text = f"{self._num_rejected} so far at port {port}, the last from {connection.peer}"
            self.membership.state.notes.append(f"refused a connection that did not prove this run's secret ({text})")
        self._end(connection, "closed")

    def _connected(self, connection: Connection) -> None:
        error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        connection.connecting = False
        if not error:
            with suppress(
                OSError
            ):  # a connection to a port that is free may be given that port itself (TCP self-connect)
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
        """Carries out what the membership has asked for: notes for the user, requests to the store, messages."""
        for note in self.membership.state.notes:
            say(note)
        self.membership.state.notes.clear()
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
                else:  # messages are sent only after the handshake, so there is nothing to wait for
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
        """In a forked process: closes all sockets without sending anything to the others."""
        for connection in self._connections.values():
            connection.sock.close()
        self.listener.close()
        if self.reserved_port is not None:
            self.reserved_port.close()
        if self.store is not None:
            self.store.leave_in_child()
        self._selector.close()

    def close(self) -> None:
        """Tells the others that this launcher ends, and waits a moment until they have read it."""
        # The journals go before the connections are closed, over which they travel.
        self._journals.send_rest(is_final=True)
        self._journals.await_last(self.pause)
        self.membership.leave()
        self._carry_out()
        for connection in list(self._connections.values()):
            self.membership.peers.close(connection.key)
        self._carry_out()
        deadline = time.monotonic() + _GOODBYE_S
        while not self._has_left() and time.monotonic() < deadline:
            for event, _ in self._selector.select(0.1):
                if isinstance(event.data, StoreLink):
                    self._receive_from_store(event.data)
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
        """Returns whether the others have read the last messages, and the store no longer names this launcher."""
        has_left_store = self.membership.store is None or self.membership.store.leave(time.monotonic())
        self._carry_out()
        return has_left_store and not self._connections


def _how_failed(code: int) -> str:
    """How a connection attempt failed, for `Membership.on_closed`.

    Only "refused" comes from the host itself, and so proves that no launcher listens there.
    """
    return "refused" if code == errno.ECONNREFUSED else "silent"


def rules_of(job: Job) -> Rules:
    """Returns the settings on which all launchers must agree, and their timeouts.

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
            fix="give the run a shorter name",
        )
    heartbeat_s = float(options.get("keep_alive_interval", 1))
    attempts = int(options.get("keep_alive_max_attempt", 5))
    if attempts < _FEWEST_KEEP_ALIVES:
        raise LaunchError(
            "launch-keep-alive",
            f"with keep_alive_max_attempt={attempts} a node that is late for a moment counts as lost.",
            why="--rdzv-conf",
            fix=f"set it to {_FEWEST_KEEP_ALIVES} or more, with a shorter keep_alive_interval",
        )
    join_timeout_s = options.get("timeout", options.get("join_timeout", _DEFAULT_JOIN_TIMEOUT_S))
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
