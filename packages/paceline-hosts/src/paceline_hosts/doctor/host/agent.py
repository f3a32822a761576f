"""Runs on each host of an examination, and answers the requests of `examine.py` one by one, until its input ends."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import cut
from paceline.base.version import VERSION
from paceline.launch import host
from paceline_hosts.doctor.facts import HostFacts, Versions
from paceline_hosts.doctor.host import links, system
from paceline_hosts.doctor.host.folder import FolderProbe
from paceline_hosts.doctor.host.network import lookups, network, own_addresses, reachable_at
from paceline_hosts.remote.agent import StarterChannel
from paceline_hosts.remote.channels import Channels

_TORCH = (sys.executable, "-m", "paceline_hosts.doctor.host.torch_process")


class Agent:
    """Answers the requests, and holds the state of this host between them.

    Each method except `close` answers the request of the same name: it gets the fields of the request as arguments, and
    returns the answer.
    """

    def __init__(self) -> None:
        self._name = ""
        self._token = ""
        self._no_cwd = ""
        self._folder: FolderProbe | None = None
        self._listener: links.LinkListener | None = None
        self._torch = Channels((), ())

    def hello(self, name: str, number: int, token: str, env: dict[str, str], cwd: str, folder: str) -> dict[str, Any]:
        """Sets up the environment that a run would have on this host, and begins to import torch.

        Args:
            name: the name that the starter uses for this host.
            number: its number among the hosts.
            token: the token of this examination.
            env: environment variables of the run.
            cwd: the working directory of a run.
            folder: the shared folder.
        """
        self._name = name
        self._token = token
        environment.export(dict(env))
        try:
            os.chdir(cwd)
        except OSError as error:
            self._no_cwd = (error.strerror or "").lower()
        self._folder = FolderProbe(folder, token, number)
        # torch runs in a process of its own: if importing it hangs or crashes, this process can still answer. It starts here,
        # so that the import goes on during the other steps.
        self._torch = Channels(["torch"], [_TORCH])
        self._listener = links.LinkListener(token)
        return {
            "paceline": VERSION,
            "hostname": host.name(),
            "addresses": reachable_at([]),
            "port": self._listener.port,
        }

    def clock(self) -> dict[str, Any]:
        """Returns the time of this host's clock."""
        return {"time": time.time()}

    def addresses(self, towards: list[str]) -> dict[str, Any]:
        """Returns the addresses by which the others may reach this host, the likeliest first."""
        return {"addresses": reachable_at(towards)}

    def facts(self, peers: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Returns all facts that can be found without torch.

        Args:
            peers: other host -> the name that it has for itself (`hostname`), and its `addresses`.
        """
        questions = {}
        for name, peer in peers.items():
            questions[name] = (peer["hostname"], next(iter(peer["addresses"]), ""))
        # Both ask the name server. At the same time, they wait for one that does not answer only once.
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(own_addresses)
            rows = lookups(questions)
        limits = system.limits()
        facts = HostFacts(
            Versions(VERSION, platform.python_version(), sys.executable),
            network({name: peer["addresses"] for name, peer in peers.items()}, own.result()),
            system.processors(),
            rows,
            open_files=limits.get("open_files"),
            locked_memory=limits.get("locked_memory"),
            processes=limits.get("processes"),
            core_files=limits.get("core_files"),
            shared_memory=system.shared_memory(),
            programs=system.programs(),
            in_container=system.in_container(),
            has_rdma=system.has_rdma(),
            no_cwd=self._no_cwd,
        )
        return {"facts": asdict(facts)}

    def torch(self, timeout_s: float) -> dict[str, Any]:
        """Returns the facts that need torch; if there is no answer, `silent` says why."""
        answers, silent = self._torch.exchange({0: {"do": "facts"}}, timeout_s)
        return answers.get(0) or {"silent": silent[0]}

    def connections(self, peers: dict[str, tuple[list[str], int]]) -> dict[str, Any]:
        """Returns which ports of the other hosts this host reaches; see `links.connections`."""
        rows = links.connections(self._name, peers, self._token)
        return {"connections": [asdict(row) for row in rows]}

    def measure(self, target: str, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Returns the latency and the bandwidth of the path to another host."""
        try:
            link = links.measure(self._name, target, address, port, self._token, seconds)
        except (OSError, ValueError) as error:
            return {"failed": cut(f"{self._name} -> {target}: {error}", 300)}
        return {"link": asdict(link)}

    def free_port(self) -> dict[str, Any]:
        """Returns a free port at which rank 0 can listen."""
        return {"port": host.free_port()}

    def all_reduce(self, request: dict[str, Any], first_rank: int, processes: int, timeout_s: float) -> dict[str, Any]:
        """Takes part in all-reduces with several processes, one for each device; see `torch_process.all_reduce`.

        Args:
            request: the request that all processes get.
            first_rank: rank of the first process of this host.
            processes: number of processes of this host.
            timeout_s: how long to wait for them.
        """
        more = Channels(["torch"] * (processes - 1), [_TORCH] * (processes - 1))
        others: dict[int, dict[str, Any]] = {}
        try:
            requests = []
            for device in range(processes):
                requests.append({**request, "do": "all_reduce", "rank": first_rank + device, "device": device})
            # The process that has imported torch already is one of them. All ranks must run at the same time, so the others
            # are asked by a second thread.
            ask = partial(more.exchange, dict(enumerate(requests[1:])), timeout_s)
            thread = threading.Thread(target=lambda: others.update(ask()[0]))
            thread.start()
            answers, silent = self._torch.exchange({0: requests[0]}, timeout_s)
            thread.join()
        finally:
            more.close()
        if 0 not in answers:
            return {"error": silent[0]}
        errors = [answer["error"] for answer in others.values() if answer["error"]]
        return {**answers[0], "error": next(iter(errors), answers[0]["error"])}

    def folder(self, step: str, **arguments: Any) -> dict[str, Any]:
        """Carries out one step of the test of the shared folder; see `folder.py`."""
        assert self._folder is not None, "hello comes first"
        result = getattr(self._folder, step)(**arguments)
        return {"result": asdict(result) if step == "use" else result}

    def close(self) -> None:
        """Stops the listener and the process with torch."""
        if self._listener is not None:
            self._listener.close()
        self._torch.close()


def main() -> int:
    """Answers the requests of the starter until its connection ends."""
    channel = StarterChannel()
    agent = Agent()
    try:
        while True:
            request = channel.receive()
            try:
                answer = getattr(agent, request.pop("do"))(**request)
            except Exception as error:  # a step that fails on this host must not end the examination of all hosts
                answer = {"failed": cut(f"{type(error).__name__}: {error}", 500)}
            channel.answer(**answer)
    finally:
        agent.close()


if __name__ == "__main__":
    sys.exit(main())
