"""The driver's side of a run on Ray: the hosts of one placement group, from their placement to their end.

    place -> compare facts -> send the assignment, which the host checks -> listen -> reach the first host -> go -> exit code

A host whose actor or node is lost while others run is placed again in the same bundle, as soon as Ray has a node for it, and
joins the run: the launchers of the other hosts decide when the next round begins (`membership/`). If all hosts are lost,
`follow` returns None.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.base.errors import LaunchError
from paceline.base.exits import PREEMPTED
from paceline.base.terminal import say
from paceline.config.kinds import least_and_most
from paceline.launch.processes.signals import Signals
from paceline_hosts.assignment import Assignment
from paceline_hosts.hostfile import Slots
from paceline_hosts.launchers.ray.cluster import Bundle
from paceline_hosts.launchers.ray.host import RayHost, reason
from paceline_hosts.launchers.ray.node import NodeActor
from paceline_hosts.remote.channels import unfit_hosts_error

_HEARTBEAT_S = 5.0
# After a failure the launchers end each other. One that never joined the others is asked to end after this time.
_AFTER_FAILURE_S = 5.0
_TURN_S = 0.2
_CALLS = 4  # how many calls an actor serves at the same time; one of them always waits for output
_REPLACE_S = 1.0  # the pause before a lost host is placed again, so that one that is lost at once does not keep us busy
_OF_RAY = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")  # variables that Ray sets for its own processes


@dataclass(frozen=True)
class Demand:
    """What is run on hosts of a Ray cluster.

    Attributes:
        assignment: what the hosts run; the names of its hosts are filled in when they are known.
        bundle: what each host needs.
        port: where node 0 listens; 0 for any free port.
        timeout_s: how long a host may take to get ready.
        function: what the processes call, packed; None where they run a script.
        follows_cwd: whether Ray has copied the working directory, so that each host uses the one of its actor.
    """

    assignment: Assignment
    bundle: Bundle
    port: int
    timeout_s: float
    function: bytes | None = None
    follows_cwd: bool = False

    @property
    def width(self) -> tuple[int, int]:
        """The fewest and the most hosts."""
        return least_and_most(self.assignment.settings.launch.nodes)

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a host."""
        least, most = self.width
        return least < most

    def with_restarts(self, restarts: int) -> Demand:
        """Returns the same demand with so many restarts left."""
        launch = replace(self.assignment.settings.launch, max_restarts=restarts)
        settings = replace(self.assignment.settings, launch=launch)
        assignment = replace(self.assignment, settings=settings)
        return replace(self, assignment=assignment)


class RayHosts:
    """The hosts of one placement group.

    Args:
        demand: what they run.
        group: the placement group.
    """

    def __init__(self, demand: Demand, group: Any) -> None:
        self.demand = demand
        self.group = group
        self.signals: list[int] = []  # signals that are still to be passed on to the hosts
        self._begun = False
        self._ending = False
        self._steps: dict[int, Iterator[None]] = {}  # what is left to do for each host that gets ready, by its number
        self._replace_at: dict[int, float] = {}  # when a lost host is placed again, by its number
        self._lost: dict[int, RayHost] = {}  # the last host of each number that was lost
        self._alive_at = time.monotonic()
        self.hosts = {node: self._place(node) for node in range(group.bundle_count)}

    def _place(self, node: int) -> RayHost:
        """Asks Ray for the actor of a host. Ray creates it as soon as the bundle has a node."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray has arguments of their own for cores and GPUs, and refuses them among the resources.
        others = dict(self.demand.bundle)
        num_cpus = others.pop("CPU")
        num_gpus = others.pop("GPU", 0)
        # `max_restarts=0`: an actor that Ray restarts by itself would have no agent. A lost host is placed by `_advance`.
        actor = ray.remote(NodeActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=others, max_concurrency=_CALLS, max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node),
        ).remote()  # fmt: skip
        host = RayHost(node, actor)
        self._steps[node] = self._get_ready(host)
        return host

    def _get_ready(self, host: RayHost) -> Iterator[None]:
        """Prepares a host step by step, until it is ready to begin or has a problem.

        This is a generator, and so are the steps that it calls: each yields while it waits for the host, so that one thread
        can prepare all hosts at the same time (`_advance`).
        """
        yield from host.call(host.actor.facts.remote())
        host.facts = host.result
        # The names of hosts depend on each other (`_name`), so each waits for the facts of all. A host that is placed again
        # later does not wait.
        while not self._begun and any(other.facts is None and not other.problems for other in self.hosts.values()):
            yield
        if host.facts is not None:
            yield from self._assign(host)
        if self.demand.width[1] > 1 and not host.problems:
            yield from self._meet(host)
        host.ready = not host.problems

    def _assign(self, host: RayHost) -> Iterator[None]:
        """Starts the agent on a host, which checks the assignment."""
        assert host.facts is not None, "it has been placed"
        demand = self.demand
        host.host = self._name(host)
        # Only its own name is known to this host: the others may still be on their way.
        ids = demand.assignment.hosts[0].ids
        hosts = [Slots(f"node{node}", ids) for node in self.hosts]
        hosts[host.node] = Slots(host.host, ids)
        # Ray copies the working directory to a path that only the actor knows. Without a copy, the folder of the driver is
        # expected at the same path on each host.
        cwd = demand.assignment.cwd
        if demand.follows_cwd:
            cwd = host.facts["cwd"]
        assignment = replace(demand.assignment, hosts=tuple(hosts), cwd=cwd)
        variables: dict[str, str | None] = dict.fromkeys(_OF_RAY)  # None removes a variable
        # The agent itself is a Python program that must import Paceline, before it has read the assignment.
        if "PYTHONPATH" in assignment.env:
            variables["PYTHONPATH"] = assignment.env["PYTHONPATH"]
        yield from host.call(host.actor.start.remote(cwd, variables, demand.function))
        if host.problems:
            return
        host.begin_to_receive()
        yield from host.ask({"orders": assignment.to_message(), "node": host.node})
        if host.result:
            host.problems += host.result["problems"]

    def _meet(self, host: RayHost) -> Iterator[None]:
        """Tells a host to listen, and to try whether it reaches the first host."""
        # Every host listens, because another one leads if the first one is lost. The port that the user chose is for the first
        # host; the others take any free one.
        port = self.demand.port if host.node == 0 else 0
        yield from host.ask({"listen": port, "towards": []})
        if host.result and host.result["problem"]:
            host.problems.append(host.result["problem"])
        if host.problems or host.facts is None:
            return
        # Nodes of a Ray cluster reach each other at these addresses.
        host.place = (host.facts["address"], int(host.result["port"]))
        first = self.hosts[0]
        while not self._begun and first.place is None and not first.problems:
            yield
        if self._begun or first is host or first.place is None:
            return
        yield from host.ask({"reach": [[first.place[0]], first.place[1]]})
        if host.result and not host.result["reached"]:
            host.problems.append(f"it does not reach {first.shown} at port {first.place[1]}")

    def _name(self, host: RayHost) -> str:
        """Returns the name of a host for messages: its own host name if no other host has the same, or else `nodeN`."""
        names = [other.facts["host"] for other in self.hosts.values() if other.facts is not None]
        assert host.facts is not None, "it has been placed"
        own = str(host.facts["host"])
        if len(self.hosts) > 1 and names.count(own) == 1:
            return own
        return f"node{host.node}"

    def prepare(self, asked_to_end: Callable[[], object]) -> bool:
        """Gets all hosts ready. Returns False if a signal asks to end meanwhile.

        Raises:
            LaunchError: `launch-hosts`, with the problems of each host that cannot take part.
        """
        deadline = time.monotonic() + self.demand.timeout_s
        while self._steps and time.monotonic() < deadline:
            if asked_to_end():
                return False
            self._turn()
        for host in self.hosts.values():
            if not host.ready and not host.problems:
                host.problems.append(f"it did not get ready within {self.demand.timeout_s:g} s")
        self._compare()
        unfit = [host for host in self.hosts.values() if host.problems]
        if unfit:
            raise unfit_hosts_error(len(self.hosts), [host.shown for host in unfit], _problem_lines(unfit))
        return True

    def _compare(self) -> None:
        """Adds a problem to each host whose release of torch is not that of the first host."""
        releases = {host.node: host.facts["torch"] for host in self.hosts.values() if host.facts is not None}
        first = releases.get(0, "")
        for node, release in releases.items():
            if release != first:
                host = self.hosts[node]
                host.problems.append(
                    f"torch is {release or 'not installed'} there, and {first} on {self.hosts[0].shown}"
                )

    def begin(self) -> None:
        """Lets all hosts start their processes."""
        self._begun = True
        for host in self.hosts.values():
            self._go(host)

    def _go(self, host: RayHost) -> None:
        place = None
        if self.demand.width[1] > 1:
            # A launcher finds the run at any of these addresses, so that a host can join after the first one was lost. A host
            # without an address keeps its place in the list, with a port at which nobody listens.
            places = [other.place or ("127.0.0.1", 9) for other in self.hosts.values()]
            listed = ",".join(f"{address}:{port}" for address, port in places)
            place = (listed, places[0][1])
        host.begun = host.running = True
        host.send({"go": place})

    def follow(self, signals: Signals) -> int | None:
        """Shows what all hosts write, until their end. Returns the exit code of the run, or None if all hosts were lost.

        Raises:
            LaunchError: as `_exit_code`.
        """
        codes: list[int] = []  # in the order of their ends
        end_at = float("inf")  # when hosts that still run are asked to end
        while any(host.running for host in self.hosts.values()):
            ended = [host.code for host in self._turn() if host.code is not None]
            codes += ended
            any_failed = any(code != 0 for code in ended)
            if any_failed and not self.demand.elastic and not self._ending:
                self._ending = True
                end_at = time.monotonic() + _AFTER_FAILURE_S
            self.signals += signals.take_new()
            if signals.ending:
                # The signal itself asks the hosts to end, and gives them their grace period: no second one may cut it short.
                self._ending = True
                end_at = float("inf")
            if time.monotonic() >= end_at:
                end_at = float("inf")
                self.signals.append(signal.SIGTERM)
            for number in self.signals:
                for host in self.hosts.values():
                    if host.running:
                        host.send({"signal": int(number)})
            self.signals.clear()
        if codes:
            return self._exit_code(codes)
        if signals.ending:
            return 128 + signals.ending[0]  # the exit code of a shell for a program that a signal has ended
        return None

    def _exit_code(self, codes: Sequence[int]) -> int:
        """Returns the exit code of a run whose launchers ended with these.

        Raises:
            LaunchError: `launch-host-lost`, if a host of a run that needs all of them has sent no exit code.
        """
        failed = [code for code in codes if code not in (0, PREEMPTED)]
        if failed:
            return failed[0]
        missing: list[RayHost] = []
        for host in self.hosts.values():
            if host.code is None:
                # The host that was lost says why. The one that has replaced it may have no problem to report.
                missing.append(self._lost.get(host.node, host))
        if missing and not self.demand.elastic:
            raise lost_error(missing)
        # In a run on a range of hosts one may have saved and ended, while the others went on to the end.
        went_on = self.demand.elastic and 0 in codes
        if PREEMPTED in codes and not went_on:
            return PREEMPTED
        return 0

    def _turn(self) -> list[RayHost]:
        """Reads answers, takes the next steps and sends heartbeats. Returns the hosts whose launcher has ended since."""
        before = [host for host in self.hosts.values() if host.running]
        self._read()
        self._advance()
        now = time.monotonic()
        if now - self._alive_at > _HEARTBEAT_S:
            self._alive_at = now
            for host in self.hosts.values():
                if host.running:
                    host.send(None)
        ended = []
        for host in before:
            if host.code is None or not host.running:
                continue
            if host.code < 0:
                # A signal has ended the agent itself, so nothing is known about the processes.
                self._lose(host, f"its launcher was ended by signal {-host.code}")
            else:
                host.running = False
                ended.append(host)
        return ended

    def _read(self) -> None:
        """Takes in the answers that have arrived, and waits a moment if there are none."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        by_call: dict[Any, RayHost] = {}
        for waiting_host in self.hosts.values():
            if waiting_host.pending is not None:
                by_call[waiting_host.pending] = waiting_host
        if not by_call:
            time.sleep(_TURN_S)
            return
        # `ray.wait` returns as soon as one call is answered, and then names no other. A second look takes all of them, so that
        # a host that writes much cannot keep the others waiting.
        answered, _ = ray.wait(list(by_call), num_returns=1, timeout=_TURN_S)
        if answered:
            answered, _ = ray.wait(list(by_call), num_returns=len(by_call), timeout=0)
        for call in answered:
            host = by_call[call]
            try:
                host.take(ray.get(call))
            except ActorUnavailableError:
                if host.running:
                    # The network may be back in a moment, so the output is asked for again. If the actor has died, Ray raises
                    # another error at that call.
                    time.sleep(_TURN_S)
                    host.take(None)
                else:
                    self._lose(host, "it could not be reached")
            except RayError as error:
                self._lose(host, reason(error))

    def _advance(self) -> None:
        """Takes the next step with each host that gets ready, and with those that are to be placed again."""
        for node, steps in list(self._steps.items()):
            host = self.hosts[node]
            at_end = object()
            if next(steps, at_end) is not at_end:
                continue
            del self._steps[node]
            if self._begun and host.ready:
                self._go(host)
            elif self._begun and node not in self._replace_at:
                say(f"{host.shown} cannot take part again: {'; '.join(host.problems)}")
        for node, at in list(self._replace_at.items()):
            if time.monotonic() >= at:
                del self._replace_at[node]
                self.hosts[node] = self._place(node)

    def _lose(self, host: RayHost, why: str) -> None:
        """Takes note that a host is gone. If others run, it is placed again after a pause."""
        host.pending = None
        host.code = None
        host.problems.append(why)
        self._lost[host.node] = host
        if not self._begun:
            return
        if host.running:
            say(f"{host.shown} was lost: {why}")
        host.running = False
        # Without a host that runs there is no run to join: `follow` then returns None, and its caller may start all again.
        if not self._ending and any(other.running for other in self.hosts.values()):
            self._kill(host)
            self._replace_at[host.node] = time.monotonic() + _REPLACE_S

    def values(self) -> list[Any]:
        """What the function returned, packed, by rank."""
        import ray

        packed: dict[int, bytes] = {}
        for host in self.hosts.values():
            if host.code == 0:
                packed |= ray.get(host.actor.values.remote())
        return [packed[rank] for rank in sorted(packed)]

    def _kill(self, host: RayHost) -> None:
        import ray

        ray.kill(host.actor)

    def close(self) -> None:
        """Ends all actors and what runs on their hosts, and removes the placement group."""
        import ray
        from ray.exceptions import RayError

        for host in self.hosts.values():
            try:
                if self.demand.function is not None and host.facts is not None and not host.problems:
                    ray.get(host.actor.close.remote(), timeout=_AFTER_FAILURE_S)
            except RayError:
                pass  # the actor is gone, and its node with the files that it would remove
            self._kill(host)
        ray.util.remove_placement_group(self.group)


def lost_error(hosts: Sequence[RayHost]) -> LaunchError:
    """Returns the error of a run that cannot go on without the hosts that were lost."""
    names = ", ".join(host.shown for host in hosts)
    fix = "start again: the script resumes; with --max-restarts, or a range such as --nodes 1:2, that happens by itself"
    return LaunchError("launch-host-lost", f"the Ray cluster lost {names}.", _problem_lines(hosts), fix)


def _problem_lines(hosts: Sequence[RayHost]) -> list[str]:
    lines: list[str] = []
    for host in hosts:
        lines += [f"{host.shown}: {problem}" for problem in host.problems]
    return lines
