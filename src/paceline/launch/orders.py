"""What one host is told to run for a run that was started from another one, as it travels there."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.base.version import VERSION
from paceline.config.given import Choice
from paceline.config.settings import LaunchSettings, RunSettings
from paceline.config.sources import Launch
from paceline.launch import secret
from paceline.launch.hostfile import Slots

VARIABLE = "PACELINE_ORDERS"  # where they travel through the environment of mpirun or srun


def python_version() -> str:
    """Of this interpreter, as far as hosts must agree."""
    return ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class Orders:
    """A run on several hosts.

    Attributes:
        told: the merged settings.
        script, args: what to run.
        cwd: the working directory, the same everywhere.
        env: variables that go along; they may hold secrets.
        hosts: who takes part, in the order of their ranks.
        local_rank: whether `--local_rank=N` goes before the script's own arguments.
        secret: made for this run, by which its launchers know each other.
        version, python: of the host that gave the orders.
    """

    told: Launch
    script: str
    args: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    hosts: tuple[Slots, ...]
    local_rank: bool = False
    secret: str = field(default_factory=secret.new, repr=False)
    version: str = VERSION
    python: str = python_version()

    def message(self) -> dict[str, Any]:
        """As they travel."""
        return {**asdict(self), "env": dict(self.env)}

    @classmethod
    def of(cls, message: dict[str, Any]) -> Orders:
        """As they have travelled; for orders of this version alone."""
        told = message["told"]
        launch, run = LaunchSettings(**told["launch"]), RunSettings(**told["run"])
        decisions = tuple(Choice(**row) for row in told["decisions"])
        hosts = tuple(Slots(each["host"], tuple(each["ids"])) for each in message["hosts"])
        args = tuple(message["args"])
        return cls(**{**message, "told": Launch(launch, run, decisions), "hosts": hosts, "args": args})

    def on(self, node: int, place: tuple[str, int] | None) -> Launch:
        """The settings of one host.

        Args:
            node: its number.
            place: where node 0 listens; None where there is no other.
        """
        slots = self.hosts[node].ids
        mine: dict[str, Any] = {
            "hostfile": None,
            "nodes": len(self.hosts),
            "node_rank": node,
            "rdzv_backend": "static",
            "procs": len(slots),
            "gpu_ids": ",".join(map(str, slots)),
        }
        if place is not None:
            mine |= {"main_address": place[0], "main_port": place[1]}
        rows = tuple(
            Choice(row.field, mine[row.field], "command line", "--hostfile") if row.field in mine else row
            for row in self.told.decisions
        )
        return replace(self.told, launch=replace(self.told.launch, **mine), decisions=rows)
