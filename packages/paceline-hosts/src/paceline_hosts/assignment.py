"""What a host runs for a run that was started from another host, as it is sent there."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.base.version import VERSION
from paceline.config.given import Choice
from paceline.config.settings import LaunchSettings, RunSettings
from paceline.config.sources import Launch
from paceline.launch.job import Job
from paceline_hosts.hostfile import Slots
from paceline_hosts.network import secret

# mpirun and srun pass the assignment to each host in this variable, as JSON. An older version of Paceline called an assignment
# "orders". This name and the key "orders" of the messages must not change: a host with another version reads them, and then
# reports its version.
VARIABLE = "PACELINE_ORDERS"


def assignment_of(job: Job) -> Assignment:
    """Returns the assignment of a job on other hosts."""
    assert isinstance(job.assignment, Assignment), "a job of other hosts has an assignment"
    return job.assignment


def python_version() -> str:
    """Returns the version of this interpreter, without the part that may differ between hosts."""
    return ".".join(platform.python_version_tuple()[:2])


@dataclass(frozen=True)
class Assignment:
    """A run on several hosts.

    Attributes:
        settings: the merged settings.
        script, args: what to run.
        cwd: the working directory, the same everywhere.
        env: variables that go along; they may hold secrets.
        hosts: who takes part, in the order of their ranks.
        local_rank: whether `--local_rank=N` goes before the script's own arguments.
        own_devices: each host uses the accelerators that its environment names, as a scheduler has set it there
            (CUDA_VISIBLE_DEVICES); if not, those that are numbered as its slots.
        secret: made for this run, by which its launchers know each other.
        version, python: of the host that the run was started from.
    """

    settings: Launch
    script: str
    args: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    hosts: tuple[Slots, ...]
    local_rank: bool = False
    own_devices: bool = False
    secret: str = field(default_factory=secret.new, repr=False)
    version: str = VERSION
    python: str = python_version()

    def to_message(self) -> dict[str, Any]:
        """Returns the assignment as a message."""
        return {**asdict(self), "env": dict(self.env)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Assignment:
        """Reads a message of this version of Paceline."""
        merged = message["settings"]
        settings = Launch(
            LaunchSettings(**merged["launch"]),
            RunSettings(**merged["run"]),
            tuple(Choice(**row) for row in merged["decisions"]),
        )
        hosts = tuple(Slots(host["host"], tuple(host["ids"])) for host in message["hosts"])
        return cls(**{**message, "settings": settings, "hosts": hosts, "args": tuple(message["args"])})

    def settings_of(self, node: int, place: tuple[str, int] | None) -> Launch:
        """Returns the settings of one host.

        Args:
            node: its number.
            place: where node 0 listens; None where there is no other.
        """
        slots = self.hosts[node].ids
        nodes = self.settings.launch.nodes
        values: dict[str, Any] = {
            "hostfile": None,
            # With a range, more hosts may join later.
            "nodes": nodes if isinstance(nodes, str) else len(self.hosts),
            "node_rank": node,
            "rdzv_backend": "static",
            "procs": len(slots),
        }
        if not self.own_devices:
            values["gpu_ids"] = ",".join(map(str, slots))
        if place is not None:
            values["main_address"], values["main_port"] = place
        decisions = list(self.settings.decisions)
        for index, row in enumerate(decisions):
            if row.field in values:
                decisions[index] = Choice(row.field, values[row.field], "command line", "--hostfile")
        return replace(self.settings, launch=replace(self.settings.launch, **values), decisions=tuple(decisions))
