"""What the leader of n launchers computes: processor time of its protocol in each phase of a run, without a network.

python benchmarks/scale/leading.py [--hosts 1024,4096,16384]

One launcher leads. The messages of the others are handed to it one by one, in the worst order: all join before the first one
says that it is ready. What it answers is counted and dropped.

    join      all ask to join
    ready     all say that they are ready; the last word begins the proposal of the first round
    accept    all accept it, and the round begins
    failure   the processes of one fail, those of the others are stopped, and the second round is proposed
    lost      a quarter of the hosts is lost at once in the second round, and the third one is proposed
    done      the processes of all that are left end
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paceline.launch.rounds import Member, Report
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Accept, Join, Message, ProcessesEnded
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from scale import growth

HOSTS = (1024, 4096, 16384)
PHASES = ("join", "ready", "accept", "failure", "lost", "done")


class Leader:
    """A launcher that leads, and the messages of the others, whose connections have the numbers 2, 4, 6..."""

    def __init__(self, hosts: int) -> None:
        self.rules = Rules(least=hosts // 2, most=hosts, max_restarts=3)
        self.members = [Member(f"n{number}", f"host{number}", 8, f"10.0.0.{number}", 1) for number in range(hosts)]
        self.now = 0.0
        state = LauncherState(self.members[0], self.rules, True, [], self.now)
        self.membership = Membership(state, self.now)
        self.membership.processes_ended(Report("new", store_port=1), self.now)
        assert isinstance(self.membership.role, Leadership)

    @property
    def leadership(self) -> Leadership:
        """The role of this launcher."""
        role = self.membership.role
        assert isinstance(role, Leadership)
        return role

    def hear(self, numbers: Iterable[int], message: Callable[[int], Message]) -> None:
        """Takes in one message of each of these launchers."""
        for number in numbers:
            self.membership.on_message(2 * number, message(number), self.now)
            self.membership.peers.actions.clear()

    def accept(self, numbers: Iterable[int]) -> None:
        """The others accept what is proposed."""
        proposed = self.leadership.number
        self.hear(numbers, lambda number: Accept(proposed))
        self.membership.state.take_round()
        assert self.leadership.stage == "run"

    def stop(self, numbers: Iterable[int]) -> None:
        """The processes of all are stopped."""
        self.hear(numbers, lambda number: ProcessesEnded(Report("stopped", store_port=1)))
        self.membership.processes_ended(Report("stopped", store_port=1), self.now)

    def lose(self, numbers: Iterable[int]) -> None:
        """The connections of these end, and nobody answers at their places."""
        for number in numbers:
            self.membership.on_closed(2 * number, "closed", self.now)
        for key in list(self.membership.peers.requests):
            self.membership.on_closed(key, "refused", self.now)
        self.membership.peers.actions.clear()


def phases(hosts: int) -> dict[str, float]:
    """Processor time of the leader of so many hosts, by phase."""
    leader = Leader(hosts)
    others = range(1, hosts)
    left = range(1, hosts - hosts // 4)
    seconds: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], None]) -> None:
        begun = time.process_time()
        work()
        seconds[phase] = time.process_time() - begun

    def fail() -> None:
        leader.hear([1], lambda number: ProcessesEnded(Report("failed", "rank 8 failed", 1.0, 1)))
        leader.stop(range(2, hosts))

    def lose() -> None:
        leader.lose(range(hosts - hosts // 4, hosts))
        leader.stop(left)

    def end() -> None:
        leader.hear(left, lambda number: ProcessesEnded(Report("done")))
        leader.membership.processes_ended(Report("done"), leader.now)

    timed("join", lambda: leader.hear(others, lambda number: Join(leader.members[number], leader.rules.common, 0)))
    timed("ready", lambda: leader.hear(others, lambda number: ProcessesEnded(Report("new", store_port=1))))
    assert leader.leadership.stage == "propose", leader.leadership.stage
    timed("accept", lambda: leader.accept(others))
    timed("failure", fail)
    assert leader.leadership.stage == "propose", leader.leadership.stage
    leader.accept(others)
    timed("lost", lose)
    assert leader.leadership.stage == "propose", leader.leadership.stage
    leader.accept(left)
    timed("done", end)
    assert leader.membership.state.end is not None and leader.membership.state.end.code == 0
    return seconds


def table(hosts: tuple[int, ...] = HOSTS) -> str:
    """Times by hosts, as Markdown."""
    by_hosts = {number: phases(number) for number in hosts}
    lines = [
        f"| phase | {' | '.join(f'{number:,}' for number in hosts)} | exponent |",
        "|---|" + "---|" * (len(hosts) + 1),
    ]
    for phase in PHASES:
        seconds = {number: by_hosts[number][phase] for number in hosts}
        cells = " | ".join(f"{value:.2f} s" for value in seconds.values())
        lines.append(f"| {phase} | {cells} | {growth.exponent(seconds):.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)))
    print(table(tuple(int(number) for number in parser.parse_args().hosts.split(","))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
