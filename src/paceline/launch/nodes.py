"""The launchers of several nodes, joined for the length of a run by one connection from each to node 0.

    node 0 listens at main_port    <- hello (node, nodes, procs, ...) -    nodes 1, 2, ...
    all are there, and agree       -  welcome (procs of each node)   ->    the listener closes, rank 0 takes the port
    each attempt                   <- ready / go ->
    a node fails or is lost        -  failed ->                            all stop at once, instead of after a timeout

Lines of JSON; nothing else of the run goes this way.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from paceline.base.errors import LaunchError, Problem
from paceline.launch import host
from paceline.launch.launcher import Job

_PATIENCE_S = 300.0
_TRY_AGAIN_S = 0.2
_WORD_S = 1.0  # how long to wait for word that another node failed before this one did


class Link:
    """One connection between two launchers."""

    def __init__(self, connection: socket.socket, node: int) -> None:
        self.connection = connection
        self.node = node
        self.left = False  # it said that it has ended well
        self._rest = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a cut cable sends no word
        for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def say(self, **message: Any) -> None:
        """Sends a message; a peer that is gone is noticed by who listens to it."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """The messages that have come; `{"lost": True}` once the peer is gone. Waits for at least one piece."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] + ([] if data else [{"lost": True}])


class Nodes:
    """All nodes of a job, as this node's launcher sees them.

    Attributes:
        procs: how many processes each node runs, by node number.
        hosts: their names.
        links: on node 0 one to each other node; elsewhere the one to node 0.
        number: of the attempt.
        trouble: the first failure of this attempt, on any node; "" for none.
    """

    def __init__(self, job: Job, links: list[Link], procs: list[int], hosts: list[str]) -> None:
        self.job = job
        self.links = links
        self.procs = procs
        self.hosts = hosts
        self.trouble = ""
        self.number = 0
        self._since = float("inf")  # when that was
        self._ready: set[int] = set()
        self._go = False

    @classmethod
    def meet(cls, job: Job) -> Nodes:
        """Waits for all nodes.

        Raises:
            LaunchError: `launch-address`, where node 0 cannot be reached or a node does not come in time;
                `launch-nodes`, where nodes disagree.
        """
        if job.nodes == 1:
            return cls(job, [], [job.procs], [host.name()])
        patience_s = float(job.options.get("timeout", job.options.get("join_timeout", _PATIENCE_S)))
        return _receive_all(job, patience_s) if job.node_rank == 0 else _call(job, patience_s)

    def listen(self, links: Iterable[Link]) -> None:
        """Takes in what has come over some links."""
        for link in links:
            for message in link.hear():
                self._take(link, message)

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        if "done" in message:
            link.left = True
        elif "ready" in message:
            self._ready.add(link.node)
        elif "go" in message:
            self._go = True
        elif "failed" in message and message["attempt"] == self.number:
            self._learn(str(message["failed"]), float(message["at"]))
        elif "lost" in message and link in self.links:
            self.links.remove(link)
            link.connection.close()
            if not link.left:
                self._learn(f"node {link.node} ({self.hosts[link.node]}) was lost", time.time())

    def _learn(self, what: str, at: float) -> None:
        """Somebody has failed: keeps the earliest, and as node 0 passes it on."""
        if at < self._since:
            self.trouble, self._since = what, at
            if self.job.node_rank == 0:
                self._tell(failed=what, at=at, attempt=self.number)

    def _tell(self, **message: Any) -> None:
        for link in self.links:
            link.say(**message)

    def failed(self, what: str, at: float) -> bool:
        """Tells the others that a rank of this node has failed; whether another node was the first to."""
        mine = f"node {self.job.node_rank} ({self.hosts[self.job.node_rank]}): {what}"
        if at < self._since:
            self.trouble, self._since = mine, at
            self._tell(failed=mine, at=at, attempt=self.number)
        if self.links and self.trouble == mine:
            self._wait(_WORD_S)
        return self.trouble != mine

    def attempt(self, number: int, asked_to_end: Callable[[], object], patience_s: float = 60.0) -> bool:
        """Waits until all nodes are ready to start their processes; False where one is lost by then."""
        self.number, self.trouble, self._since = number, "", float("inf")
        if number == 0:
            return True  # they have just met
        if self.job.node_rank != 0:
            self._tell(ready=number)
        deadline = time.monotonic() + patience_s
        expected = self.job.nodes - 1 if self.job.node_rank == 0 else min(self.job.nodes - 1, 1)
        while not (self._go or len(self._ready) == self.job.nodes - 1):
            self._wait(0.5)
            if time.monotonic() > deadline or len(self.links) < expected or asked_to_end():
                self.trouble = self.trouble or "not all nodes came back for the restart"
                return False
        self._ready.clear()
        self._go = False
        if self.job.node_rank == 0:
            self._tell(go=number)
        return True

    def finish(self, asked_to_end: Callable[[], object]) -> None:
        """This node has ended well; node 0 stays until all have, as it carries word between them."""
        self._tell(done=True)
        waits = self.job.node_rank == 0
        while waits and not self.trouble and not asked_to_end() and any(not link.left for link in self.links):
            self._wait(0.5)

    def _wait(self, timeout_s: float) -> None:
        readable, _, _ = select.select([link.connection for link in self.links], [], [], timeout_s)
        self.listen([link for link in self.links if link.connection in readable])

    def close(self) -> None:
        """Drops all connections."""
        for link in self.links:
            link.connection.close()
        self.links = []


def _hello(job: Job) -> dict[str, Any]:
    mine = {"node": job.node_rank, "nodes": job.nodes, "procs": job.procs}
    return {**mine, "host": host.name(), "restarts": job.max_restarts}


def _receive_all(job: Job, patience_s: float) -> Nodes:
    """Node 0: waits for the others to call, and checks that all say the same."""
    said = {0: _hello(job)}
    links: dict[int, Link] = {}
    deadline = time.monotonic() + patience_s
    with host.hold_port(job.main_port) as listener:
        listener.listen()
        while len(links) < job.nodes - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [node for node in range(job.nodes) if node not in said]
                raise _unreachable(
                    f"nodes {missing} did not come within {patience_s:g} s.",
                    f"node 0 waits at port {job.main_port}",
                    "start the same command on each of them, with --main-address naming this host",
                ) from None
            connection.settimeout(10)
            hello = Link(connection, -1).hear()[0]
            if "node" not in hello:
                connection.close()  # a port scanner, or a launcher that was ended
                continue
            problem = _disagreement(said, hello)
            if problem is not None:
                for link in (Link(connection, -1), *links.values()):
                    link.say(refused=[problem.what, problem.why, problem.fix])
                raise LaunchError.of([problem])
            said[hello["node"]] = hello
            links[hello["node"]] = Link(connection, hello["node"])
    order = [said[node] for node in range(job.nodes)]
    procs, hosts = [each["procs"] for each in order], [each["host"] for each in order]
    for link in links.values():
        link.connection.settimeout(None)
        link.say(procs=procs, hosts=hosts)
    return Nodes(job, list(links.values()), procs, hosts)


def _disagreement(said: dict[int, dict[str, Any]], hello: dict[str, Any]) -> Problem | None:
    mine, node = said[0], hello["node"]
    fix = "start the same command on every node, with another --node-rank on each"
    for name in ("nodes", "restarts"):
        if hello[name] != mine[name]:
            why = f"node 0 ({mine['host']}) says {mine[name]}, node {node} ({hello['host']}) says {hello[name]}"
            return Problem("launch-nodes", f"nodes disagree about the number of {name}.", why, fix)
    if node in said or not 0 < node < mine["nodes"]:
        other = said.get(node, mine)["host"]
        return Problem("launch-nodes", f"node {node} is there twice.", f"from {other} and from {hello['host']}", fix)
    return None


def _call(job: Job, patience_s: float) -> Nodes:
    """Another node: calls node 0 until it answers."""
    place = f"{job.main_address}:{job.main_port}"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection = socket.create_connection((job.main_address, job.main_port), timeout=10)
            break
        except socket.gaierror as error:
            why = f"--main-address {job.main_address}: {str(error.strerror).lower()}"
            raise _unreachable("node 0 has no such name.", why, "give its IP address") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(
                    f"node 0 does not answer at {place} within {patience_s:g} s.",
                    f"--main-address, --main-port; the last try said: {error}",
                    "start node 0 too, let its firewall pass that port, or wait longer with --rdzv-conf timeout=600",
                ) from None
            time.sleep(_TRY_AGAIN_S)
    link = Link(connection, 0)
    link.say(**_hello(job))
    connection.settimeout(patience_s)
    for message in link.hear():
        if "procs" in message:
            connection.settimeout(None)
            return Nodes(job, [link], message["procs"], message["hosts"])
        if "refused" in message:
            raise LaunchError("launch-nodes", *message["refused"])
    raise _unreachable(
        f"node 0 at {place} hung up.",
        "it was ended, or is no `paceline launch`",
        "look at node 0's messages; start node 0 first",
    )


def _unreachable(what: str, why: str, fix: str) -> LaunchError:
    return LaunchError("launch-address", what, why, fix)
