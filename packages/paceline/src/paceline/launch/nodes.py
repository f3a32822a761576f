"""The nodes of a job, as the launcher of one of them sees them: when its processes start, and whether they start again.

A job on this host alone is `ThisNode`. Several nodes have to find each other, agree, and notice when one is lost: that is the
entry point "membership" of `paceline.nodes`, which the extra hosts adds. Under torchrun, srun and mpirun, which start the
processes themselves, neither is used.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.base.exits import PREEMPTED
from paceline.base.parts import missing
from paceline.base.registry import Registry
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.rounds import End, Member, Report, Round, StopMode
from paceline.world.stacks.parse import RankPlace

NODES = Registry("paceline.nodes", "way for nodes to find each other")


@dataclass(frozen=True)
class GatheredPlaces:
    """Holds where the ranks of a run are.

    Attributes:
        places: the ranks that are known here.
        notes: a line for each node whose ranks are missing.
        reporter: the launcher that reports all ranks; "" if this one has to.
    """

    places: list[RankPlace]
    notes: Sequence[str] = ()
    reporter: str = ""


class OtherStacks(Protocol):
    """The stacks of ranks of other nodes, which the launcher that leads collects for one report."""

    def wanted(self) -> str:
        """Returns the headline of the report for which the leader wants the stacks of this host; "" if it wants none."""
        ...

    def answer(self, places: Sequence[RankPlace]) -> None:
        """Sends the leader where the ranks of this host are, if it wants to know."""
        ...

    def asked(self) -> str:
        """Returns the headline of the next report that another node wants of this one, and forgets it; "" if none is wanted."""
        ...

    def gather(self, headline: str, own: Callable[[], list[RankPlace]]) -> GatheredPlaces:
        """Asks the leader for a report; or collects the places of all ranks, if this launcher leads or no other one answers.

        Args:
            headline: what the report is about.
            own: collects the places of the ranks of this host.
        """
        ...


class Nodes(Protocol):
    """What a launcher asks of the nodes of its job.

    Attributes:
        several: whether there may be other nodes.
        stacks: the stacks of the ranks of other nodes; None where there are no other nodes.
    """

    several: bool
    stacks: OtherStacks | None

    @property
    def end(self) -> End | None:
        """How the run has ended; None while it goes on."""
        ...

    @property
    def stop_request(self) -> tuple[StopMode, str] | None:
        """How and why the processes of this node must be stopped; None while they may run."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this launcher decides for all nodes, and writes what is the same for all of them."""
        ...

    def index_in(self, decided: Round) -> int:
        """Returns the number of this node in a round."""
        ...

    def address_of_rank_0(self, decided: Round) -> str:
        """Returns the address at which the processes of this node reach rank 0."""
        ...

    def next(self, asked_to_end: Callable[[], object]) -> Round | None:
        """Waits for the next round; returns None where the run has ended or `asked_to_end` returns true."""
        ...

    def processes_ended(self, report: Report) -> None:
        """Takes in that all processes of this node have ended, or, before the first round, that it is ready to start."""
        ...

    def leave(self, how: StopMode, why: str) -> None:
        """Takes in that this node was asked to end."""
        ...

    def record_into(self, folder: Path) -> None:
        """Says where this node records the run from now on; later calls change nothing."""
        ...

    def fileno(self) -> int | None:
        """A file descriptor that becomes readable when `poll` has something to do; None for none."""
        ...

    def poll(self) -> None:
        """Does what is due; does not wait."""
        ...

    def pause(self, seconds: float) -> None:
        """Waits for some seconds, or less; other nodes are served meanwhile."""
        ...

    def leave_in_child(self) -> None:
        """In a forked process: closes all sockets without sending anything to others."""
        ...

    def close(self) -> None:
        """Ends; the others learn of it."""
        ...


def nodes_of(job: Job) -> Nodes:
    """Returns the nodes of a job. Several nodes begin to look for each other with the first `poll`.

    Raises:
        ConfigError: `part-missing`, for several nodes where the extra hosts is not installed.
        LaunchError: those of the entry point, for several nodes.
    """
    if job.nodes == 1:
        return ThisNode(job)
    need_part(job)
    nodes: Nodes = NODES.get("membership").open_for(job)
    return nodes


def need_part(job: Job) -> None:
    """Checks that several nodes can be started at all, before torch is imported.

    Raises:
        ConfigError: `part-missing`.
    """
    if job.nodes > 1 and "membership" not in NODES.names():
        raise missing(
            "hosts", "the start of several nodes is", f"there are {job.nodes} nodes (--nodes, or srun's tasks)"
        )


class ThisNode:
    """The only node of a job.

    Args:
        job: the job.
    """

    several = False
    leads = True
    stacks: OtherStacks | None = None

    def __init__(self, job: Job) -> None:
        self.stop_request: tuple[StopMode, str] | None = None
        self.end: End | None = None
        self._job = job
        self._member = Member(f"{os.getpid()}-{os.urandom(6).hex()}", host.name(), job.procs)
        self._founded_at = time.time()
        self._round: Round | None = None  # the last one that was decided
        self._is_next_decided = False
        # A socket that reserves a port for rank 0 of the next round.
        self._reserved_port: socket.socket | None = None

    def index_in(self, decided: Round) -> int:
        """As `Nodes.index_in`."""
        return 0

    def address_of_rank_0(self, decided: Round) -> str:
        """As `Nodes.address_of_rank_0`."""
        return self._job.main_address

    def next(self, asked_to_end: Callable[[], object]) -> Round | None:
        """As `Nodes.next`."""
        while not asked_to_end() and self.end is None:
            if self._is_next_decided:
                self._is_next_decided = False
                self.stop_request = None
                return self._round
            time.sleep(0.05)  # this launcher was asked to end, by a signal that its handler has not seen yet
        return None

    def processes_ended(self, report: Report) -> None:
        """Decides whether another round follows."""
        if self._reserved_port is not None:
            self._reserved_port.close()
        self._reserved_port = host.hold_port(self._job.main_port)
        port = self._reserved_port.getsockname()[1]
        if self.stop_request is not None:
            return  # this launcher ends
        if report.kind == "done":
            self.end = End(0)
        elif report.kind == "preempted":
            self.end = End(PREEMPTED, "all processes have saved and ended")
        elif self._round is None:
            self._decide(Round(1, 0, (self._member,), port, "", self._founded_at))
        else:
            why = self._failure(report)
            restarts = self._round.restarts + (report.kind == "failed")
            if restarts > self._job.max_restarts or not report.again:
                self.end = End(1, why, self._member.id)
            else:
                number = self._round.number + 1
                self._decide(replace(self._round, number=number, restarts=restarts, store_port=port, reason=why))

    def leave(self, how: StopMode, why: str) -> None:
        """As `Nodes.leave`."""
        self.stop_request = (how, why)

    def record_into(self, folder: Path) -> None:
        """Nothing: there is no other folder."""

    def fileno(self) -> None:
        """None: there is nothing to wait for."""
        return

    def poll(self) -> None:
        """Nothing: there are no other nodes."""

    def pause(self, seconds: float) -> None:
        """As `Nodes.pause`."""
        time.sleep(seconds)

    def leave_in_child(self) -> None:
        """As `Nodes.leave_in_child`."""
        if self._reserved_port is not None:
            self._reserved_port.close()

    def close(self) -> None:
        """As `Nodes.close`."""
        self.leave_in_child()

    def _decide(self, decided: Round) -> None:
        self._round = decided
        self._is_next_decided = True

    def _failure(self, report: Report) -> str:
        return f"node 0 ({self._member.host}): {report.what}" if report.what else ""
