"""Carries out an examination: asks all hosts, each step with a time limit, and collects the answers in one `Examination`.

A host that does not answer a step in time is left out of the later steps. The examination notes at which step it was silent.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from paceline.base import json_fields as typed
from paceline.base.version import VERSION
from paceline_hosts.doctor.facts import (
    AllReduce,
    AllReduces,
    ClockFacts,
    ConnectionFacts,
    Devices,
    Examination,
    FolderUse,
    HostFacts,
    LinkFacts,
    Versions,
)
from paceline_hosts.doctor.hosts import Reached
from paceline_hosts.doctor.rounds import Pair, rounds, sizes, slow_rounds
from paceline_hosts.remote.channels import Channels

# Time limits of the steps: the longest time that a step needs when nothing is wrong, and some room.
_HELLO_S = 20.0  # ssh itself gives up after 10 s
_FACTS_S = 12.0
_CLOCK_S = 5.0
_CONNECTIONS_S = 8.0
_TORCH_S = 60.0  # torch may lie on a shared folder, and is then read by all hosts at the same time
_LINK_S = 8.0
_ALL_REDUCE_S = 25.0
_FOLDER_S = 12.0
_LINKS_BUDGET_S = 15.0
_CLOCK_TRIALS = 5
T = TypeVar("T")


class Examiner:
    """Examines hosts.

    Args:
        hosts: the hosts, and how they are reached.
        folder: absolute path of the shared folder.
        folder_was_named: whether the user named it.
        progress: is called before each step with a few words about it.
    """

    def __init__(self, hosts: Reached, folder: str, folder_was_named: bool, progress: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._folder = folder
        self._folder_was_named = folder_was_named
        self._progress = progress
        # By this token a host knows the other hosts of the same examination.
        self._token = secrets.token_hex(16)
        self._channels = Channels(hosts.names, hosts.commands, hosts.port)
        # The hosts that have answered all requests so far: name -> number of the channel.
        self._active = {name: number for number, name in enumerate(hosts.names)}
        self._silent: dict[str, str] = {}
        self._addresses: dict[str, list[str]] = {}
        self._ports: dict[str, int] = {}
        self._versions: dict[str, str] = {}

    def examine(self) -> Examination:
        """Carries out all steps."""
        # The order matters: each step needs the answers of earlier ones, and a cheap step finds silent hosts before an
        # expensive one has to wait for them.
        count = len(self._hosts.names)
        self._progress(f"connecting to {count} hosts" if count > 1 else "starting")
        hostnames = self._greet()
        self._progress("names, interfaces, limits")
        facts = self._facts(hostnames)
        clocks: dict[str, ClockFacts] = {}
        connections: list[ConnectionFacts] = []
        if len(self._active) > 1:
            self._progress("clocks")
            clocks = self._clocks()
            self._progress("ports")
            connections = self._connections()
        self._progress("torch and devices")
        facts = self._torch(facts)
        links: list[LinkFacts] = []
        if len(self._active) > 1:
            self._progress("latency and bandwidth")
            links = self._links(connections)
        all_reduces = self._all_reduces(facts, connections, links)
        self._progress(f"the folder {self._folder}")
        uses = self._try_folder()
        return Examination(
            self._hosts.names,
            dict(self._silent),
            facts,
            clocks,
            tuple(connections),
            tuple(links),
            all_reduces,
            self._folder,
            self._folder_was_named,
            uses,
        )

    def close(self) -> None:
        """Closes all connections, which also ends the processes on the hosts."""
        self._channels.close()

    def _ask(self, step: str, requests: Mapping[str, dict[str, Any]], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Asks some of the active hosts, and returns their answers by name. Hosts without an answer are noted as silent.

        Args:
            step: name of the step, for the note.
            requests: host -> its request.
            timeout_s: how long to wait for the answers.
        """
        # Channels are known by numbers. A host that was silent since the requests were written gets none.
        messages = {self._active[name]: request for name, request in requests.items() if name in self._active}
        answers, silent = self._channels.exchange(messages, timeout_s)
        answers_by_name = {}
        for name in list(self._active):
            number = self._active[name]
            if number in silent:
                # Answers carry no number. A late answer would be taken for the answer to the next request, so this host is
                # not asked again.
                self._silent[name] = f"{step}: {silent[number]}"
                del self._active[name]
            elif number in answers and "failed" in answers[number]:
                self._silent[name] = f"{step}: {answers[number]['failed']}"
            elif number in answers:
                answers_by_name[name] = answers[number]
        return answers_by_name

    def _ask_all(self, step: str, request: dict[str, Any], timeout_s: float) -> dict[str, dict[str, Any]]:
        return self._ask(step, dict.fromkeys(self._active, request), timeout_s)

    def _greet(self) -> dict[str, str]:
        """Gives each host the environment of a run, and returns the name that each host has for itself."""
        common = {"do": "hello", "token": self._token, "env": dict(self._hosts.env), "folder": self._folder}
        requests = {}
        for name, number in self._active.items():
            requests[name] = {**common, "name": name, "number": number, "cwd": os.getcwd()}
        answers = self._ask("connecting", requests, _HELLO_S)
        hostnames = {}
        for name, answer in answers.items():
            hostnames[name] = answer["hostname"]
            self._addresses[name] = answer["addresses"]
            self._ports[name] = answer["port"]
            self._versions[name] = answer["paceline"]
        # A host that was not reached by ssh does not know which of its addresses the others can use. It finds that out from
        # the interface by which it reaches an address of each other host.
        first_addresses = {name: addresses[0] for name, addresses in self._addresses.items() if addresses}
        towards = {}
        for name in answers:
            others = [address for other, address in first_addresses.items() if other != name]
            towards[name] = {"do": "addresses", "towards": others}
        for name, answer in self._ask("addresses", towards, _FACTS_S).items():
            self._addresses[name] = answer["addresses"]
        return hostnames

    def _facts(self, hostnames: Mapping[str, str]) -> dict[str, HostFacts]:
        """Asks each host for its facts; it also looks up the names and addresses of all others."""
        requests = {}
        for name in self._active:
            peers = {}
            for other in self._active:
                if other != name:
                    peers[other] = {"hostname": hostnames[other], "addresses": self._addresses[other]}
            requests[name] = {"do": "facts", "peers": peers}
        facts = {}
        for name, answer in self._ask("facts", requests, _FACTS_S).items():
            host_facts = self._read(name, HostFacts, answer["facts"])
            if host_facts is not None:
                facts[name] = host_facts
        return facts

    def _read(self, name: str, kind: type[T], value: object) -> T | None:
        """Converts what a host has sent; notes the host as silent if its version of paceline uses another format."""
        try:
            converted: T = typed.read(kind, value, kind.__name__)
        except ValueError as error:
            versions = f"paceline {self._versions.get(name)} there, {VERSION} here"
            self._silent[name] = f"what it sends cannot be read ({versions}): {error}"
            self._active.pop(name, None)
            return None
        return converted

    def _clocks(self) -> dict[str, ClockFacts]:
        """Compares the clock of each host with the clock here, by Cristian's algorithm.

        The host's answer is taken to be from the middle of the round trip, so the error is at most half of the round trip.
        Of several exchanges, the one with the shortest round trip counts.
        """
        clocks: dict[str, ClockFacts] = {}
        for name in list(self._active):
            for _ in range(_CLOCK_TRIALS):
                # The duration comes from the monotonic clock, which no correction of the time can move.
                begun = time.monotonic()
                begun_at = time.time()
                answer = self._ask("clock", {name: {"do": "clock"}}, _CLOCK_S).get(name)
                if answer is None:
                    break
                trip = time.monotonic() - begun
                middle_at = begun_at + trip / 2
                clock = ClockFacts(answer["time"] - middle_at, trip / 2)
                if name not in clocks or clock.bound_s < clocks[name].bound_s:
                    clocks[name] = clock
        return clocks

    def _connections(self) -> list[ConnectionFacts]:
        """Lets each host connect to the port of each other host."""
        requests = {}
        for name in self._active:
            peers = {}
            for other in self._active:
                if other != name:
                    peers[other] = (self._addresses[other], self._ports[other])
            requests[name] = {"do": "connections", "peers": peers}
        connections = []
        for name, answer in self._ask("ports", requests, _CONNECTIONS_S).items():
            rows = [self._read(name, ConnectionFacts, row) for row in answer["connections"]]
            connections += [row for row in rows if row is not None]
        return connections

    def _torch(self, facts: Mapping[str, HostFacts]) -> dict[str, HostFacts]:
        """Returns the facts, completed by those that need torch."""
        # The host itself stops waiting after `_TORCH_S`, and then says why. Its answer needs some more time to arrive.
        answers = self._ask_all("torch", {"do": "torch", "timeout_s": _TORCH_S}, _TORCH_S + 5)
        complete = dict(facts)
        for name, host in facts.items():
            answer = answers.get(name, {"silent": "the host did not answer"})
            if "silent" in answer:
                complete[name] = replace(host, versions=replace(host.versions, torch_error=answer["silent"]))
                continue
            versions = self._read(name, Versions, answer["versions"])
            devices = self._read(name, Devices, answer["devices"])
            if versions is not None and devices is not None:
                complete[name] = replace(host, versions=versions, devices=devices)
        return complete

    def _links(self, connections: list[ConnectionFacts]) -> list[LinkFacts]:
        """Measures pairs of hosts. The pairs of one round are measured at the same time, as no host is in two of them."""
        usable = {(row.source, row.target): row for row in connections if row.outcome == "open"}
        seconds, plan = rounds(list(self._active), _LINKS_BUDGET_S)
        links: dict[Pair, LinkFacts] = {}
        self._measure(plan, seconds, usable, links)
        # A slow link is measured once more, and the better result counts: a host may have been busy for a moment.
        self._measure(slow_rounds(plan, links), seconds, usable, links)
        return list(links.values())

    def _measure(
        self,
        plan: Sequence[Sequence[Pair]],
        seconds: float,
        usable: Mapping[Pair, ConnectionFacts],
        links: dict[Pair, LinkFacts],
    ) -> None:
        """Measures rounds of pairs; of an old and a new result for a pair, the better one is stored in `links`."""
        for pairs in plan:
            requests = {}
            for source, target in pairs:
                connection = usable.get((source, target))
                if connection is not None and target in self._active:
                    place = {"target": target, "address": connection.address, "port": connection.port}
                    requests[source] = {"do": "measure", **place, "seconds": seconds}
            for name, answer in self._ask("links", requests, _LINK_S).items():
                link = self._read(name, LinkFacts, answer["link"])
                if link is None:
                    continue
                pair = (link.source, link.target)
                if pair not in links or links[pair].bytes_per_s < link.bytes_per_s:
                    links[pair] = link

    def _all_reduces(
        self, facts: Mapping[str, HostFacts], connections: list[ConnectionFacts], links: list[LinkFacts]
    ) -> AllReduces | None:
        """Measures all-reduces over all hosts, with one process for each device, or one for a host without devices.

        Returns:
            The times; None if there is only one process, or if the connections that it needs are not open.
        """
        names = [name for name in self._active if name in facts and facts[name].versions.torch]
        processes = {name: max(len(facts[name].devices.names), 1) for name in names}
        world_size = sum(processes.values())
        # If a port is closed, an all-reduce would wait for it until its timeout. The check of ports reports it already.
        if world_size < 2 or any(row.outcome != "open" for row in connections):
            return None
        self._progress("all-reduce")
        address = "127.0.0.1"
        if len(names) > 1:
            # All processes must be given the same address of the host of rank 0. If the hosts reach it at different
            # addresses, there is none, which the check of ports reports.
            used_addresses = [row.address for row in connections if row.target == names[0] and row.outcome == "open"]
            if len(set(used_addresses)) != 1:
                return None
            address = used_addresses[0]
        # Rank 0 listens at this port. Only its host knows which of its ports are free.
        answer_of_first = self._ask("all-reduce", {names[0]: {"do": "free_port"}}, _CLOCK_S).get(names[0], {})
        port = answer_of_first.get("port")
        if port is None:
            return None
        slowest = min((link.bytes_per_s for link in links), default=None)
        has_devices = any(facts[name].devices.names for name in names)
        # The inner timeouts are shorter than the outer ones, so that a failure is reported by the process that knows most.
        common = {
            "store": [address, port],
            "world_size": world_size,
            "sizes": sizes(slowest, has_devices),
            "timeout_s": _ALL_REDUCE_S - 10,
        }
        requests = {}
        first_rank = 0
        for name in names:
            own = {"first_rank": first_rank, "processes": processes[name], "timeout_s": _ALL_REDUCE_S - 3}
            requests[name] = {"do": "all_reduce", "request": common, **own}
            first_rank += processes[name]
        answers = self._ask("all-reduce", requests, _ALL_REDUCE_S)
        errors = [f"{name}: {answer['error']}" for name, answer in answers.items() if answer["error"]]
        if errors:
            return AllReduces("", world_size, error=errors[0])
        if names[0] not in answers:
            return AllReduces("", world_size, error="no answer")
        # All ranks leave an all-reduce together, so that the times of rank 0 stand for all.
        first = answers[names[0]]
        times = []
        for row in first["times"]:
            all_reduce = self._read(names[0], AllReduce, row)
            if all_reduce is not None:
                times.append(all_reduce)
        return AllReduces(first["backend"], world_size, tuple(times))

    def _try_folder(self) -> dict[str, FolderUse]:
        """Tries the shared folder, by the steps that `host/folder.py` describes."""
        if not self._active:
            return {}
        first = next(iter(self._active))
        # All hosts look before the file exists: a network file system may then go on to say for a while that there is none.
        self._ask_all("folder", {"do": "folder", "step": "look"}, _FOLDER_S)
        answers = self._ask("folder", {first: {"do": "folder", "step": "make"}}, _FOLDER_S)
        if first not in answers or answers[first]["result"]:
            error = "it did not answer"
            if first in answers:
                error = answers[first]["result"]
            return {first: FolderUse(error)}
        uses: dict[str, FolderUse] = {}
        for name, answer in self._ask_all("folder", {"do": "folder", "step": "use"}, _FOLDER_S).items():
            use = self._read(name, FolderUse, answer["result"])
            if use is not None:
                uses[name] = use
        # Each host reads the file of the next one: its own file would come from its own memory.
        writers = [name for name in uses if uses[name].write_bytes_per_s]
        requests = {}
        for place, name in enumerate(writers):
            other = self._active.get(writers[(place + 1) % len(writers)])
            requests[name] = {"do": "folder", "step": "read", "other": other}
        for name, answer in self._ask("folder", requests, _FOLDER_S).items():
            uses[name] = replace(uses[name], read_bytes_per_s=answer["result"])
        cleaned = self._ask("folder", {first: {"do": "folder", "step": "clean"}}, _FOLDER_S)
        if first in uses and cleaned.get(first, {}).get("result"):
            uses[first] = replace(uses[first], error=f"it cannot be cleaned up: {cleaned[first]['result']}")
        return uses
