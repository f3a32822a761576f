"""How the membership protocol grows with hosts: time, messages and CPU to agree after losses, in simulation.

python benchmarks/scale/membership.py [--hosts 8,32,128,512] [--lost 1,8,64] [--store]

The real protocol over a simulated network (tests/simulated_network.py) with delays of 1 to 50 ms. Hosts are lost all at once,
in silence; with `leader` the leader is among them. The simulated seconds count from the loss until all others run the next
round: 5 s of silence, up to 1.5 s until processes have ended, and what the protocol adds. CPU seconds are of this machine;
those of the leader are what one launcher spends, since on real hosts each has its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from simulated_network import Host, Simulation

from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.messages import Heartbeat, HeartbeatAck, Proposal, encode
from paceline_hosts.membership.rules import Rules
from scale import growth

HOSTS = (8, 32, 128, 512)
LOST = (1, 8, 64)
PATIENCE_S = 60.0
_STEP_S = 0.05


@dataclass(frozen=True)
class Row:
    """One loss.

    Attributes:
        hosts: how many there were.
        lost: how many of them were lost.
        leader: whether the leader was.
        seconds: simulated, until all others ran the next round.
        messages: sent by all meanwhile, heartbeats apart.
        heartbeats: sent meanwhile, answers included.
        messages_a_host: the first, for each host that is left.
        leader_messages: sent by the leader that decides.
        round_bytes: of the message that says who takes part.
        leader_cpu_s: spent by that leader's protocol.
        cpu_s: spent by all.
    """

    hosts: int
    lost: int
    leader: bool
    seconds: float
    messages: int
    heartbeats: int
    messages_a_host: float
    leader_messages: int
    round_bytes: int
    leader_cpu_s: float
    cpu_s: float


class Counted(Simulation):
    """A simulation that counts what is sent, and does not look for broken promises, which takes longer than the protocol."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent: dict[str, int] = {}
        self.heartbeats = 0
        self.round_bytes = 0
        self.cpu_s: dict[str, float] = {}

    def start(self, name: str, *args: Any, **options: Any) -> Host:
        """Starts a launcher whose protocol is timed."""
        host = super().start(name, *args, **options)
        for method in ("on_message", "on_closed", "tick", "processes_ended"):
            setattr(host.membership, method, self._timed(name, getattr(host.membership, method)))
        return host

    def _timed(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **options: Any) -> None:
            begun = time.perf_counter()
            method(*args, **options)
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.perf_counter() - begun

        return timed

    def act(self, host: Host, kind: str, key: int, *rest: Any) -> None:
        """Counts a message."""
        if kind == "send":
            if isinstance(rest[0], Heartbeat | HeartbeatAck):
                self.heartbeats += 1
            else:
                self.sent[host.name] = self.sent.get(host.name, 0) + 1
            if isinstance(rest[0], Proposal) and not self.round_bytes:
                self.round_bytes = len(encode(rest[0]))
        super().act(host, kind, key, *rest)

    def rounds_changed(self) -> None:
        """Nothing: the unit tests look."""

    def _check_left_behind(self, host: Host) -> None:
        """Nothing: the unit tests look."""

    def forget(self) -> None:
        """Counts from now on."""
        self.sent, self.heartbeats, self.round_bytes, self.cpu_s = {}, 0, 0, {}

    def together(self, number: int) -> bool:
        """Whether all launchers run the same round, of this many members."""
        rounds = {host.running.number if host.running and not host.ending else 0 for host in self.hosts.values()}
        if len(rounds) > 1 or 0 in rounds:
            return False
        running = next(iter(self.hosts.values())).running
        return running is not None and len(running.members) == number

    def until_together(self, number: int) -> float:
        """Lets time pass until they do; returns the simulated seconds."""
        begun = self.now
        while not self.together(number):
            if self.now - begun > PATIENCE_S:
                raise TimeoutError(f"{number} hosts are not together after {PATIENCE_S:g} s")
            self.run(_STEP_S)
        return self.now - begun


def leader_of(network: Simulation) -> str:
    """The name of the host whose launcher leads."""
    return next(host.name for host in network.hosts.values() if isinstance(host.membership.role, Leadership))


def measure(hosts: int, lost: int, leader: bool = False, store: bool = False, seed: int = 0) -> Row:
    """One loss of `lost` of `hosts` hosts at once; `leader`: the one that leads is among them."""
    network = Counted(seed, has_store=store)
    rules = Rules(least=1, most=hosts, max_restarts=3)
    names = [f"n{number}" for number in range(hosts)]
    gc.collect()
    gc.disable()  # the simulation holds all hosts of a cluster at once; a launcher holds one
    try:
        for name in names:
            network.start(name, rules, contacts=names[:1])
        network.until_together(hosts)
        network.run(2.0)
        leads = leader_of(network)
        others = [name for name in names if name != leads]
        gone = [leads, *others[: lost - 1]] if leader else others[:lost]
        network.forget()
        for name in gone:
            network.off(network.hosts[name], silently=True)
        seconds = network.until_together(hosts - lost)
    finally:
        gc.enable()
    leads = leader_of(network)
    messages = sum(network.sent.values())
    return Row(
        hosts, lost, leader, round(seconds, 2), messages, network.heartbeats, round(messages / (hosts - lost), 1),
        network.sent.get(leads, 0), network.round_bytes, round(network.cpu_s[leads], 4), round(sum(network.cpu_s.values()), 3),
    )  # fmt: skip


def rows(hosts: Sequence[int], lost: Sequence[int], store: bool = False) -> list[Row]:
    """A row for each number of hosts, number of losses below half of them, and whether the leader is lost."""
    found = []
    for number in hosts:
        for losses in lost:
            if 2 * losses < number:
                found += [measure(number, losses, leader, store) for leader in (False, True)]
    return found


def fits(found: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By losses and leader, the power of the number of hosts with which each value grows."""
    result = {}
    for losses, leader in sorted({(row.lost, row.leader) for row in found}):
        chosen = [row for row in found if (row.lost, row.leader) == (losses, leader)]
        if len(chosen) > 1:
            name = f"{losses} lost{', the leader among them' if leader else ''}"
            values = ("seconds", "messages", "leader_messages", "leader_cpu_s", "cpu_s")
            result[name] = {
                value: round(growth.exponent({row.hosts: getattr(row, value) for row in chosen}), 2) for value in values
            }
    return result


def table(hosts: Sequence[int] = HOSTS, lost: Sequence[int] = LOST, store: bool = False) -> str:
    """The losses as Markdown, and with which power of the number of hosts each value grows."""
    measured = rows(hosts, lost, store)
    names = list(asdict(measured[0]))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in measured:
        lines.append("| " + " | ".join(str(value) for value in asdict(row).values()) + " |")
    lines += ["", "Grows as hosts to the power of:", ""]
    lines += [f"- {name}: {powers}" for name, powers in fits(measured).items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)))
    parser.add_argument("--lost", default=",".join(map(str, LOST)))
    parser.add_argument("--store", action="store_true", help="launchers have a store")
    options = parser.parse_args()
    hosts, lost = ([int(number) for number in text.split(",")] for text in (options.hosts, options.lost))
    print(table(hosts, lost, options.store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
