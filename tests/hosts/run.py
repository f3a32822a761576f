"""One training run on all hosts of a network: started over ssh, followed by what its processes write down."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hosts.network import Host, Started, until


@dataclass(frozen=True)
class Row:
    """One step of one process, as it wrote it down."""

    host: str
    pid: int
    begun: float
    rank: int
    world: int
    step: int
    loss: float
    batch: float
    time: float


class Run:
    """A run of one command on hosts.

    Args:
        folder: shared by the hosts; the scripts write `HOST.jsonl` there.
        command: the shell command to start on a host.

    Attributes:
        started: what runs on each host, by its name; the last one where it was started again.
    """

    def __init__(self, folder: Path, command: Callable[[Host], str]) -> None:
        self.folder, self.command = folder, command
        self.started: dict[str, Started] = {}
        self.logs: list[Started] = []

    def start(self, *hosts: Host) -> None:
        """Starts the command on each host."""
        for host in hosts:
            started = host.start(self.command(host), self.folder / f"{host.name}-{len(self.logs)}.log")
            self.started[host.name] = started
            self.logs.append(started)

    def rows(self, *hosts: Host) -> list[Row]:
        """What processes wrote (of these hosts, or of all), in order of time; a line that was cut off is left out."""
        found = []
        for path in [self.folder / f"{host.name}.jsonl" for host in hosts] or self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines() if path.exists() else []:
                if line.startswith("{") and line.endswith("}"):
                    found.append(Row(**json.loads(line)))
        return sorted(found, key=lambda row: row.time)

    def wait_for(self, true: Callable[[], object], what: str, timeout_s: float = 60) -> float:
        """Waits; returns the seconds. What the launchers said is in the error where it takes too long."""
        try:
            return until(true, what, timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def steps(
        self, hosts: Sequence[Host], world: int, since: float = 0.0, count: int = 1, timeout_s: float = 60
    ) -> float:
        """Waits until processes of all `hosts`, begun after the time `since`, have done `count` steps in such a world.

        Returns the seconds from `since` to the first such step.
        """

        def new() -> list[list[Row]]:
            return [[row for row in self.rows(host) if row.begun > since and row.world == world] for host in hosts]

        names = ", ".join(host.name for host in hosts)
        self.wait_for(lambda: all(len(rows) >= count for rows in new()), f"steps of {world} on {names}", timeout_s)
        return min(rows[0].time for rows in new()) - since

    def kill_worker(self, host: Host) -> float:
        """Kills the process of this host that wrote last; returns when, by the host's own clock."""
        done = host.run(f"date +%s.%N; kill -KILL {self.rows(host)[-1].pid}")
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    def finish(self, *hosts: Host, timeout_s: float = 30) -> None:
        """Lets the run end, and waits for it on these hosts; all must end with 0."""
        (self.folder / "enough").touch()
        ended = {host.name: self.started[host.name].wait(timeout_s) for host in hosts}
        assert set(ended.values()) == {0}, f"{ended}\n{self.told()}"

    def told(self) -> str:
        """All that the launchers and the scripts said."""
        return "\n".join(f"--- {each.log.name}\n{each.text()[-6000:]}" for each in self.logs)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder)
