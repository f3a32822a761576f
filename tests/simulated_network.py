"""Launchers of one run in virtual time: the real membership protocol over a simulated network.

A `Schedule` is a pure function of its seed: how many hosts there are, what they were told, and which fault strikes when.
`Simulation.play` runs it and raises `Violation` where the protocol breaks a promise (`docs/adr/0021-membership-guarantees.md`):

- one run goes on: of the rounds of a run, at most one at a time has all its members at work, and their numbers only rise;
- what is lost does not go on: a launcher that a newer round has left behind ends its processes;
- every fault is decided: within a bounded time each launcher runs in a round that all its members run, waits at the leader of
  one, or has ended; and once the network is whole and all hosts are started again, they are in one round;
- success is success of all: a launcher ends with code 0 only if all members of its last round had done their work.

Where a schedule has a store, it is one more host, "S": it answers reads and compare-and-swaps, late or never, is cut off,
stops for a while, or comes back without its memory.

Connections are as TCP's: ordered, delayed, and silent while their link is cut, so that what was sent arrives later; an end
that a dead launcher's system has closed is told, one of a host without power is not.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.launch.rounds import Member, Report, Round
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Message, decode, encode
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from paceline_hosts.membership.witness import RecordSigner, StoreRequest, Witness

Kind = Literal[
    "start",
    "kill",
    "power off",
    "power on",
    "leave",
    "stop",
    "continue",
    "fail",
    "done",
    "cut",
    "cut one way",
    "slow",
    "mend",
    "store down",
    "store up",
    "store forgets",
]
_WEIGHTS: dict[Kind, int] = {
    "start": 5, "kill": 4, "power off": 3, "power on": 1, "leave": 2, "stop": 2, "continue": 1, "fail": 3, "done": 1, "cut": 4,
    "cut one way": 1, "slow": 1, "mend": 3,
}  # fmt: skip
_PAUSES_S = (
    0.02,
    0.1,
    0.4,
    1.0,
    2.0,
    4.0,
    5.5,
    8.0,
)  # between faults: some on top of each other, some after a decision
_TICK_S = 0.25
_DELAY_S = (0.001, 0.05)
_SLOW_S = (0.05, 3.0)
_RESENT_S = (0.01, 1.5)  # after a link is mended, until TCP sends again what was lost
_STOPPED_S = (0.1, 1.5)  # what processes take to end when they are told to
STORE = "S"
_STORE_WEIGHTS: dict[Kind, int] = {"store down": 2, "store up": 2, "store forgets": 1}
_STORE_TIMEOUT_S = 3.0  # after which a launcher's client of the store gives up
_STABLE_S = 6.0  # longer than a launcher may be silent: nothing is left to be noticed


def stored_after(stored: str | None, request: StoreRequest) -> str | None:
    """The value that a store has after a request."""
    return request.new if request.swaps and stored == request.old else stored


class Violation(AssertionError):
    """A promise of the protocol was broken."""


@dataclass(frozen=True)
class Fault:
    """What happens at a moment: to hosts, or to the links between two of them.

    Attributes:
        at: seconds since the beginning.
        kind: "start" a launcher where none runs (after a fault: its host is back), "kill" it, ask it to "leave", "stop" it
            (SIGSTOP) and let it "continue"; its processes "fail" or are "done"; "power off" a host silently, or "power on",
            without a launcher; "cut" a link, "cut one way", make it "slow", "mend" all links.
        hosts: to whom.
    """

    at: float
    kind: Kind
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} {' '.join(self.hosts)}"


@dataclass(frozen=True)
class Schedule:
    """One story: its hosts, what they were told, and its faults in the order of time."""

    seed: int
    hosts: str
    rules: Rules
    contacts: str
    numbered: bool
    saves: bool
    mended: bool  # whether the network is whole again at the end
    faults: tuple[Fault, ...]
    store: bool = False

    @classmethod
    def drawn(cls, seed: int, store: bool = False) -> Schedule:
        """The schedule of a seed."""
        draw = random.Random(seed)
        number = draw.choice((2, 2, 2, 3, 4, 5) if store else (2, 3, 3, 3, 4, 5))
        hosts = "abcde"[:number]
        most = draw.choice((number, number, max(number - 1, 2)))
        least = draw.choice((1, 1, min(2, most), most // 2 + 1, most))
        rules = Rules(least, most, max_restarts=draw.choice((0, 3, 20, 20)), join_timeout_s=15.0, grace_s=5.0)
        contacts = draw.choice((hosts, hosts, hosts[:1], hosts[:2]))
        faults = [Fault(round(draw.uniform(0, 3), 2), "start", (name,)) for name in hosts]
        at = draw.choice((0.5, 4.0, 6.0))
        for _ in range(draw.randrange(1, 9)):
            at += draw.choice(_PAUSES_S) * draw.uniform(0.8, 1.2)
            if draw.random() < 0.3:
                faults += _loss_out_of_sight(draw, hosts, at, store)
            else:
                faults += _fault(draw, hosts, at, store)
            at = max(at, faults[-1].at)
        faults.sort(key=lambda fault: fault.at)
        numbered, saves, mended = (draw.random() < share for share in (0.25, 0.7, 0.75))
        return cls(seed, hosts, rules, contacts, numbered and most == number, saves, mended, tuple(faults), store)

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: hosts {self.hosts}, {self.rules.least} to {self.rules.most} in a round, "
            f"{self.rules.max_restarts} restarts, contacts {self.contacts}, numbered {self.numbered}, "
            f"processes save {self.saves}, mended at the end {self.mended}, store {self.store}",
            *map(str, self.faults),
        ]
        return "\n".join(lines)


def _fault(draw: random.Random, hosts: str, at: float, store: bool) -> list[Fault]:
    """Anything, to anybody."""
    weights = {**_WEIGHTS, **_STORE_WEIGHTS} if store else _WEIGHTS
    (kind,) = draw.choices(list(weights), list(weights.values()))
    one, other = draw.sample(hosts, 2)
    if kind == "cut" and draw.random() < 0.4:
        return _isolated(draw, one, hosts, at, store)
    if kind in ("cut", "cut one way", "slow"):
        if store and draw.random() < 0.3:
            other = STORE
        return [Fault(at, kind, (one, other))]
    return [Fault(at, kind)] if kind in ("done", "mend", *_STORE_WEIGHTS) else [Fault(at, kind, (one,))]


def _isolated(draw: random.Random, host: str, hosts: str, at: float, store: bool) -> list[Fault]:
    """A host is cut off from all others, and mostly from the store too."""
    others = hosts + STORE if store and draw.random() < 0.7 else hosts
    return [Fault(at, "cut", (host, other)) for other in others if other != host]


def _loss_out_of_sight(draw: random.Random, hosts: str, at: float, store: bool) -> list[Fault]:
    """A host sees and hears nothing while another is lost, and then both things at once: here evidence misleads."""
    blind, lost = draw.sample(hosts, 2)
    how: Kind = draw.choice(("kill", "kill", "leave", "power off"))
    again = at + draw.choice((1.0, 4.0, 6.0, 9.0, 12.0)) * draw.uniform(0.9, 1.1)
    loss = Fault(again - draw.choice((0.0, 0.1, 1.0)), how, (lost,))
    if draw.random() < 0.6:
        return [Fault(at, "stop", (blind,)), loss, Fault(again, "continue", (blind,))]
    return [*_isolated(draw, blind, hosts, at, store), loss, Fault(again, "mend")]


@dataclass(eq=False)
class Socket:
    """One end of a connection."""

    host: Host
    key: int
    peer: Socket | None = None  # None where the call never reached anybody
    last_arrival: float = 0.0  # of what the peer has sent


class Host:
    """A launcher, and the processes that it starts, which end as they are told."""

    def __init__(
        self, network: Simulation, name: str, rules: Rules, contacts: Sequence[str], node: int, saves: bool
    ) -> None:
        network.launched += 1
        self.network = network
        self.name = name
        self.saves = saves
        # A launcher founds a run where it listens at the first place that all were told.
        me = Member(f"{name}.{network.launched}", name, 1, name, 1, node)
        wall = 1000.0 + network.now + network.clock_skew_s.get(name, 0.0)
        if network.has_store:
            life = f"{me.id} founds "
            witness = Witness(network.signer, name, lambda: life + str(network.draw.random()), "store", network.now)
            rules = replace(rules, store="a store")
            state = LauncherState(me, rules, False, (), network.now, wall, witness)
        else:
            founds = contacts[0] == name if node < 0 else node == 0
            state = LauncherState(me, rules, founds, [(contact, 1) for contact in contacts], network.now, wall)
        self.membership = Membership(state, network.now)
        self.sockets: dict[int, Socket] = {}
        self.next_key = 2  # of incoming connections: even numbers
        self.gone = False
        self.frozen = False
        self.leaving = False
        self.inbox: list[tuple[Any, ...]] = []  # what has come while it is frozen
        self.rounds: list[Round] = []
        self.running: Round | None = None  # whose processes run here
        self.ending: tuple[float, Report] | None = None  # when they end, and how
        self.left_behind_since: float | None = None  # since when a newer round goes on without them
        self.membership.processes_ended(Report("new", store_port=network.launched), network.now)

    @property
    def id(self) -> str:
        """Its member's id."""
        return self.membership.state.me.id

    def react(self) -> None:
        """Does what the protocol asks for."""
        network, membership = self.network, self.membership
        while membership.peers.actions:
            kind, key, *rest = membership.peers.actions.pop(0)
            network.act(self, kind, key, *rest)
        while membership.store is not None and membership.store.witness.requests:
            network.ask_store(self, membership.store.witness.requests.pop(0))
        begun = membership.state.take_round()
        if begun is not None:
            if self.running is not None:
                raise Violation(f"{self.id} is to begin round {begun.number} while processes of another run")
            self.running = begun
            self.rounds.append(self.running)
            network.trace(self, f"begins round {self.running.number} of {' '.join(self.running.ids)}")
            network.rounds_changed()
        if membership.state.stop_request is not None and self.running is not None:
            how = membership.state.stop_request[0]
            slow = self.ending is None or self.ending[0] > network.now + 2
            if self.ending is None or (how == "end" and slow):
                saved = how == "save" and self.saves
                self.end_processes(Report("preempted" if saved else "stopped"), network.draw.uniform(*_STOPPED_S))
        if self.running is None and (membership.state.end is not None or self.leaving):
            network.ends(self)

    def end_processes(self, report: Report, after_s: float) -> None:
        """Its processes will have ended."""
        self.ending = self.network.now + after_s, report
        self.network.later(after_s, self.processes_ended, self.ending)

    def processes_ended(self, ending: tuple[float, Report]) -> None:
        """They have, unless they were ended otherwise."""
        if self.gone or ending is not self.ending or self.running is None:
            return
        if self.frozen:  # the launcher sees it when it goes on
            self.inbox.append((self.processes_ended, ending))
            return
        ended, report = self.running, ending[1]
        self.running = self.ending = None
        network = self.network
        network.trace(self, f"its processes have ended: {report.kind}")
        if report.kind == "done":
            network.done.setdefault((ended.founded_at, ended.number), set()).add(self.id)
        else:
            network.disturb_peers(self, ended)
        network.rounds_changed()
        self.membership.processes_ended(
            replace(report, at=network.now, store_port=int(network.now * 100) % 60_000), network.now
        )
        self.react()

    def ends(self, kind: Any, what: str = "", after_s: float = 0.0) -> None:
        """Its processes end by themselves."""
        if self.running is not None and self.ending is None:
            self.end_processes(Report(kind, what, self.network.now), after_s)

    def leave(self) -> None:
        """It is asked to end, as by SIGTERM."""
        self.leaving = True
        if self.running is not None:
            self.membership.drain("save", "was asked to end", self.network.now)
            report = Report("preempted" if self.saves else "stopped")
            self.end_processes(report, self.network.draw.uniform(*_STOPPED_S))
        self.react()


@dataclass
class Simulation:
    """Hosts, the links between them, and the time.

    Args:
        seed: of all delays.
        tracing: whether what happens is written down.
        on_the_wire: whether messages are written and read as on a real connection (slower).
        has_store: whether launchers are told of a store.
    """

    seed: int = 0
    tracing: bool = False
    on_the_wire: bool = False
    has_store: bool = False
    now: float = 0.0
    hosts: dict[str, Host] = field(default_factory=dict)
    ended: list[Host] = field(default_factory=list)
    launched: int = 0
    dark: set[str] = field(default_factory=set)  # hosts without power
    lines: list[str] = field(default_factory=list)
    done: dict[tuple[float, int], set[str]] = field(
        default_factory=dict
    )  # members whose processes have done their work
    whole: dict[float, Round] = field(default_factory=dict)  # by run: the last round that all its members ran
    worked: dict[tuple[float, int], set[str]] = field(default_factory=dict)  # members of every such round

    signer = RecordSigner("a secret of sixteen", "paceline")

    def __post_init__(self) -> None:
        self.stored: str | None = None  # by the store
        self.store_is_up = True
        self.draw = random.Random(self.seed)
        self.clock_skew_s = {name: self.draw.uniform(-3, 3) for name in "abcde"}
        self._events: list[tuple[Any, ...]] = []
        self._count = 0
        self._cut: set[tuple[str, str]] = set()  # links that carry nothing from the first to the second
        self._slow: set[tuple[str, str]] = set()
        self._lost: list[tuple[str, str, Socket, Callable[..., None], tuple[Any, ...]]] = []  # what TCP will send again
        self._late_requests: list[Callable[[], None]] = []  # the same, to the store

    # Time

    def later(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        """Has something happen."""
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, call, args))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Lets time pass; looks after each event whether it has been enough."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
            if until is not None and until():
                return
        self.now = end

    def trace(self, host: Host | None, text: str) -> None:
        if self.tracing:
            self.lines.append(f"{self.now:7.2f} s  {host.id if host else ''}  {text}")

    def _tick(self, host: Host) -> None:
        if host.gone:
            return
        if not host.frozen:
            host.membership.tick(self.now)
            host.react()
            self._check_left_behind(host)
        self.later(_TICK_S, self._tick, host)

    # Hosts

    def start(
        self, name: str, rules: Rules, contacts: Sequence[str] = "abc", node: int = -1, saves: bool = True
    ) -> Host:
        """Starts a launcher on a host, which has power from now on."""
        self.dark.discard(name)
        host = self.hosts[name] = Host(self, name, rules, contacts, node, saves)
        self.trace(host, "starts")
        host.react()
        self.later(self.draw.uniform(0, _TICK_S), self._tick, host)
        return host

    def off(self, host: Host, silently: bool = False) -> None:
        """A launcher and its processes are killed, or, silently, its host loses its power."""
        ran = host.running
        host.gone = True
        host.running = None
        if self.hosts.get(host.name) is host:
            del self.hosts[host.name]
        self.ended.append(host)
        self.trace(host, "loses its power" if silently else "is gone")
        if silently:
            self.dark.add(host.name)
        else:
            for socket in list(host.sockets.values()):
                self._hang_up(socket)
            if ran is not None:
                self.disturb_peers(host, ran)
        self.rounds_changed()

    def ends(self, host: Host) -> None:
        """A launcher ends as planned."""
        end = host.membership.state.end
        # It need not be a round of its own: the end is told to those that waited for a place, too.
        done = any(self.done.get(name, set()) >= members for name, members in self.worked.items())
        if end is not None and end.code == 0 and not done:
            raise Violation(f"{host.id} ends with code 0, and no round has done its work")
        self.trace(host, f"ends: {end}")
        host.membership.leave()
        while host.membership.peers.actions:
            kind, key, *rest = host.membership.peers.actions.pop(0)
            self.act(host, kind, key, *rest)
        self.off(host)
        self._leave_store(host, 4)

    def _leave_store(self, host: Host, attempts: int) -> None:
        """A launcher that ends takes itself out of the store, as far as that is possible in a moment."""
        store = host.membership.store
        if attempts and store is not None and not store.leave(self.now):
            for request in store.witness.requests:
                self.ask_store(host, request)
            store.witness.requests.clear()
            self.later(0.5, self._leave_store, host, attempts - 1)

    def freeze(self, host: Host) -> None:
        """A launcher is stopped by a signal; its processes go on."""
        host.frozen = True

    def thaw(self, host: Host) -> None:
        """It continues: what has come meanwhile comes first."""
        host.frozen = False
        host.left_behind_since = None
        inbox, host.inbox = host.inbox, []
        for call, *args in inbox:
            call(*args)

    def disturb_peers(self, host: Host, ended: Round) -> None:
        """Processes that wait for those of a host may notice that they have ended."""
        for other in self.hosts.values():
            if other.running == ended and (host.name, other.name) not in self._cut and self.draw.random() < 0.6:
                other.ends("failed", "connection closed", self.draw.uniform(0.05, 1.0))

    # The network

    def cut(self, one: str, other: str, one_way: bool = False) -> None:
        """Nothing passes a link any more."""
        self._cut |= {(one, other)} if one_way else {(one, other), (other, one)}

    def mend(self) -> None:
        """All links carry again; what was sent meanwhile arrives a little later, in order."""
        self._cut.clear()
        self._slow.clear()
        lost, self._lost = self._lost, []
        delays: dict[int, float] = {}
        for _, _, socket, call, args in lost:
            delay = delays.setdefault(id(socket), self.draw.uniform(*_RESENT_S))
            socket.last_arrival = max(socket.last_arrival, self.now + delay)
            self.later(delay, call, socket, *args)
        late, self._late_requests = self._late_requests, []
        for arrives in late:
            if self.draw.random() < 0.5:
                self.later(self.draw.uniform(*_RESENT_S), arrives)

    def act(self, host: Host, kind: str, key: int, *rest: Any) -> None:
        """What a launcher asks of the network."""
        if kind == "open":
            self._open(host, key, rest[0][0])
            return
        socket = host.sockets.get(key)
        if socket is None:
            return
        if kind == "close":
            self._hang_up(socket)
        elif socket.peer is not None:
            message = decode(encode(rest[0])) if self.on_the_wire else rest[0]
            if socket.peer.host.gone and socket.peer.host.name not in self.dark:
                # The system of a host that is back knows of no such connection.
                self._send(socket.peer.host.name, socket, self._closed)
            else:
                self._send(host.name, socket.peer, self._deliver, message)

    def _open(self, host: Host, key: int, name: str) -> None:
        socket = host.sockets[key] = Socket(host, key)
        if {(host.name, name), (name, host.name)} & self._cut or name in self.dark:
            return  # no answer comes, ever
        other = self.hosts.get(name)
        if other is None:
            self._send(name, socket, self._refused)
            return
        socket.peer = Socket(other, other.next_key, socket)
        other.sockets[other.next_key] = socket.peer
        other.next_key += 2

    def _hang_up(self, socket: Socket) -> None:
        socket.host.sockets.pop(socket.key, None)
        if socket.peer is not None and not socket.peer.host.gone:
            self._send(socket.host.name, socket.peer, self._closed)

    def _send(self, sender: str, to: Socket, call: Callable[..., None], *args: Any) -> None:
        """What one end sends arrives in order; where the link is cut, it waits until that is mended."""
        link = sender, to.host.name
        if link in self._cut:
            self._lost.append((*link, to, call, args))
            return
        delay = self.draw.uniform(*(_SLOW_S if link in self._slow else _DELAY_S))
        to.last_arrival = max(self.now + delay, to.last_arrival)
        self._count += 1
        heapq.heappush(self._events, (to.last_arrival, self._count, call, (to, *args)))

    def _closed(self, socket: Socket) -> None:
        self._end(socket, "closed")

    def _refused(self, socket: Socket) -> None:
        self._end(socket, "refused")

    def _end(self, socket: Socket, how: str) -> None:
        host = socket.host
        if host.gone or socket.key not in host.sockets:
            return
        if host.frozen:
            host.inbox.append((self._end, socket, how))
            return
        del host.sockets[socket.key]
        host.membership.on_closed(socket.key, how, self.now)
        host.react()

    def _deliver(self, socket: Socket, message: Message) -> None:
        host = socket.host
        if host.gone or socket.key not in host.sockets:
            return
        if host.frozen:
            host.inbox.append((self._deliver, socket, message))
            return
        if self.tracing:
            sender = socket.peer.host.id if socket.peer else "?"
            self.trace(host, f"<- {sender}: {message}")
        host.membership.on_message(socket.key, message, self.now)
        host.react()

    # The store

    def ask_store(self, host: Host, request: StoreRequest) -> None:
        """A request goes to the store; where it gets no answer, the client says so after a while."""
        answered = [False]

        def arrives() -> None:
            if not self.store_is_up:
                return
            self.stored = stored_after(self.stored, request)
            if (STORE, host.name) not in self._cut:
                self.later(self._store_delay(host), answer, self.stored, "")

        def answer(value: str | None, trouble: str) -> None:
            if answered[0]:
                return
            if host.gone:
                if host.membership.store is not None:
                    host.membership.store.witness.on_answer(request.key, value, trouble, self.now)
                return
            if host.frozen:
                host.inbox.append((answer, value, trouble))
                return
            answered[0] = True
            self.trace(host, f"<- store: {value and value[65:]} {trouble}")
            host.membership.on_store_answer(request.key, value, trouble, self.now)
            host.react()

        self.trace(host, f"-> store: {request.new[65:] if request.new else 'read'}")
        if (host.name, STORE) in self._cut:
            self._late_requests.append(arrives)  # it may be on its way yet
        else:
            self.later(self._store_delay(host), arrives)
        self.later(_STORE_TIMEOUT_S, answer, None, "no answer")

    def _store_delay(self, host: Host) -> float:
        return self.draw.uniform(*(_SLOW_S if (host.name, STORE) in self._slow else _DELAY_S))

    # What must hold

    def rounds_changed(self) -> None:
        """One run goes on: at most one of its rounds has all its members at work, and the numbers of such only rise."""
        running = {host.id: host.running for host in self.hosts.values() if host.running is not None}
        whole: dict[float, Round] = {}
        for decided in running.values():
            if not all(running.get(member) == decided for member in decided.ids):
                continue
            other = whole.setdefault(decided.founded_at, decided)
            if other.ids != decided.ids:
                raise Violation(f"two parts of a run go on: {other.ids} and {decided.ids}")
        for founded_at, decided in whole.items():
            last = self.whole.get(founded_at)
            if (
                last is not None
                and (decided.number, decided.ids) != (last.number, last.ids)
                and decided.number <= last.number
            ):
                raise Violation(
                    f"round {decided.number} of {decided.ids} goes on after round {last.number} of {last.ids}"
                )
            self.whole[founded_at] = decided
            self.worked[founded_at, decided.number] = set(decided.ids)

    def _check_left_behind(self, host: Host) -> None:
        """What is lost does not go on."""
        newest = self.whole.get(host.running.founded_at) if host.running is not None else None
        if host.running is None or newest is None or newest.number <= host.running.number:
            host.left_behind_since = None
            return
        if host.left_behind_since is None:
            host.left_behind_since = self.now
        behind_s = self.now - host.left_behind_since
        if behind_s > 2 * host.membership.state.rules.silence_limit_s + _STOPPED_S[1]:
            raise Violation(
                f"{host.id} still runs round {host.running.number}, {behind_s:.1f} s after round {newest.number} began"
            )

    def is_whole(self, decided: Round | None) -> bool:
        """Whether all members of a round run it."""
        if decided is None:
            return False
        running = {host.id: host.running for host in self.hosts.values() if host.ending is None}
        return all(running.get(member) == decided for member in decided.ids)

    def undecided(self) -> list[Host]:
        """Launchers that neither go on nor wait at one that does."""
        leaders = {
            host.id: (host, host.membership.role)
            for host in self.hosts.values()
            if isinstance(host.membership.role, Leadership) and not host.frozen
        }
        found = []
        for host in self.hosts.values():
            waits = False
            if host.membership.leader_id in leaders:
                leader, leadership = leaders[host.membership.leader_id]
                waits = host.id in leadership.waiting and self.is_whole(leader.running)
            if not (host.frozen or waits or self.is_whole(host.running)):
                found.append(host)
        return found

    def width(self, *names: str) -> bool:
        """Whether exactly these hosts run, in one round."""
        found = [self.hosts[name] for name in names if name in self.hosts]
        if len(found) < len(names) or not all(self.is_whole(host.running) for host in found):
            return False
        members = {member.host for host in found for member in host.running.members}  # type: ignore[union-attr]
        return members == set(names) and len({host.running.number for host in found}) == 1  # type: ignore[union-attr]

    # Schedules

    def strike(self, schedule: Schedule, fault: Fault) -> None:
        """One fault; what it cannot mean at this moment means nothing."""
        self.trace(None, f"--- {fault.kind} {' '.join(fault.hosts)}")
        name = fault.hosts[0] if fault.hosts else ""
        host = self.hosts.get(name)
        if fault.kind == "start" and host is None:
            node = schedule.hosts.index(name) if schedule.numbered else -1
            self.start(name, schedule.rules, schedule.contacts, node, schedule.saves)
        elif fault.kind == "cut":
            self.cut(*fault.hosts)
        elif fault.kind == "cut one way":
            self.cut(*fault.hosts, one_way=True)
        elif fault.kind == "slow":
            self._slow |= {fault.hosts, fault.hosts[::-1]}  # type: ignore[arg-type]
        elif fault.kind == "mend":
            self.mend()
        elif fault.kind in ("store down", "store forgets"):
            self.store_is_up = fault.kind == "store forgets"
            self.stored = None if fault.kind == "store forgets" else self.stored
        elif fault.kind == "store up":
            self.store_is_up = True
        elif fault.kind == "power on":
            self.dark.discard(name)
        elif fault.kind == "done":
            for at_work in [each for each in self.hosts.values() if self.is_whole(each.running)]:
                at_work.ends("done", after_s=self.draw.uniform(0, 0.5))
        elif host is not None:
            self._strike_host(fault.kind, host)

    def _strike_host(self, kind: Kind, host: Host) -> None:
        if kind == "kill":
            self.off(host)
        elif kind == "power off":
            self.off(host, silently=True)
        elif kind == "leave" and not host.frozen:
            host.leave()
        elif kind == "stop":
            self.freeze(host)
        elif kind == "continue":
            self.thaw(host)
        elif kind == "fail":
            host.ends("failed", "a fault")

    def play(self, schedule: Schedule) -> None:
        """Runs a schedule to its end.

        Raises:
            Violation: a promise was broken.
        """
        for fault in schedule.faults:
            self.run(fault.at - self.now)
            self.strike(schedule, fault)
        # Cuts, dead hosts and stopped launchers may stay. A link whose answers come too late is a fault while it lasts:
        # two launchers may find and lose each other over it for ever.
        self._slow.clear()
        if schedule.mended:
            self.mend()
            self.store_is_up = True
            for host in list(self.hosts.values()):
                self.thaw(host)
        self._decide(schedule)
        if schedule.mended:
            self._reunite(schedule)

    def _decide(self, schedule: Schedule) -> None:
        """Each launcher goes on or ends: after the silence that shows a loss, and twice as long as one waits for others."""
        silence_limit_s = 2 * schedule.rules.join_timeout_s + 4 * schedule.rules.silence_limit_s
        end = self.now + silence_limit_s
        while self.now < end:
            self.run(end - self.now, lambda: not self.undecided())
            before = [host.running for host in self.hosts.values()]
            self.run(_STABLE_S)
            if not self.undecided() and before == [host.running for host in self.hosts.values()]:
                return
        raise Violation(
            f"after {silence_limit_s:g} s without a fault, {[host.id for host in self.undecided()]} are undecided"
        )

    def _reunite(self, schedule: Schedule) -> None:
        """All hosts are started again where they have ended, and are in one round then; the rest waits."""
        for _ in range(4):
            for name in schedule.hosts:
                if name not in self.hosts:
                    self.strike(schedule, Fault(self.now, "start", (name,)))
            self._decide(schedule)
            rounds = {host.running for host in self.hosts.values() if host.running is not None}
            if (
                len(rounds) == 1
                and len(rounds.pop().ids) == schedule.rules.most
                and len(self.hosts) == len(schedule.hosts)
            ):
                return
        raise Violation("all hosts are up and reach each other, and they are not in one round")


def violation_of(schedule: Schedule, *, tracing: bool = False, on_the_wire: bool = False) -> tuple[str, list[str]]:
    """What a schedule breaks ("" for nothing), and its trace."""
    simulation = Simulation(schedule.seed, tracing, on_the_wire, schedule.store)
    try:
        simulation.play(schedule)
    except Exception as error:
        return f"{type(error).__name__}: {error}", simulation.lines
    return "", simulation.lines


def explained(schedule: Schedule) -> str:
    """What to read where a schedule breaks something: its fewest faults that do, and their trace."""
    shortest = schedule
    for fault in schedule.faults:
        shorter = replace(shortest, faults=tuple(each for each in shortest.faults if each is not fault))
        if violation_of(shorter)[0]:
            shortest = shorter
    problem, lines = violation_of(shortest, tracing=True)
    return "\n".join([f"{problem}\n\nthe fewest faults that do it:\n{shortest}\n\nwhat happened:", *lines])
