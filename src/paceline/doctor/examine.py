"""The steps of an examination: asks all hosts, bounded in time, and puts what they say into one `Examination`.

A host that does not answer a step in time is left out of the steps that follow; that it was silent, and when, is a fact.
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
from paceline.doctor.facts import (
    AllReduce,
    AllReduces,
    Clock,
    Connection,
    Devices,
    Examination,
    FolderUse,
    HostFacts,
    Link,
    Versions,
)
from paceline.doctor.hosts import Reached
from paceline.doctor.rounds import Pair, rounds, sizes, slow_rounds
from paceline.launch.remote.channels import Channels

# How long each step may take: what it does at the longest, and some room.
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
        hosts: which ones.
        folder: the shared folder, an absolute path.
        folder_was_named: whether the user named it.
        progress: is told each step, in a few words.
    """

    def __init__(self, hosts: Reached, folder: str, folder_was_named: bool, progress: Callable[[str], None]) -> None:
        self._hosts, self._folder, self._progress = hosts, folder, progress
        self._folder_was_named = folder_was_named
        self._token = secrets.token_hex(16)
        self._channels = Channels(hosts.names, hosts.commands, hosts.port)
        # By name: the hosts that have answered each request so far.
        self._active = {name: number for number, name in enumerate(hosts.names)}
        self._silent: dict[str, str] = {}
        self._addresses: dict[str, list[str]] = {}
        self._ports: dict[str, int] = {}
        self._versions: dict[str, str] = {}

    def examine(self) -> Examination:
        """Carries out all steps."""
        count = len(self._hosts.names)
        self._progress(f"connecting to {count} hosts" if count > 1 else "starting")
        hostnames = self._greet()
        self._progress("names, interfaces, limits")
        facts = self._facts(hostnames)
        clocks: dict[str, Clock] = {}
        connections: list[Connection] = []
        if len(self._active) > 1:
            self._progress("clocks")
            clocks = self._clocks()
            self._progress("ports")
            connections = self._connections()
        self._progress("torch and devices")
        facts = self._torch(facts)
        links: list[Link] = []
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
        """Ends all connections, and with them what runs on the hosts."""
        self._channels.close()

    def _ask(self, step: str, requests: Mapping[str, dict[str, Any]], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Asks some of the active hosts; gives the answers of those that have one, and notes the others as silent."""
        messages = {self._active[name]: request for name, request in requests.items() if name in self._active}
        answers, silent = self._channels.exchange(messages, timeout_s)
        answers_by_name = {}
        for name in list(self._active):
            number = self._active[name]
            if number in silent:
                # A late answer would be taken for that of another question: the host is asked nothing more.
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
        """Gives each host the environment of a run; returns what each calls itself."""
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
        # A host that no ssh had to reach learns by the addresses of the others which of its own they may use.
        towards = {}
        for name in answers:
            others = [first for other, (first, *_) in self._known_addresses().items() if other != name]
            towards[name] = {"do": "addresses", "towards": others}
        for name, answer in self._ask("addresses", towards, _FACTS_S).items():
            self._addresses[name] = answer["addresses"]
        return hostnames

    def _known_addresses(self) -> dict[str, list[str]]:
        return {name: addresses for name, addresses in self._addresses.items() if addresses}

    def _facts(self, hostnames: Mapping[str, str]) -> dict[str, HostFacts]:
        requests = {}
        for name in self._active:
            peers = {}
            for other in self._active:
                if other != name:
                    peers[other] = {"hostname": hostnames[other], "addresses": self._addresses[other]}
            requests[name] = {"do": "facts", "peers": peers}
        facts = {}
        for name, answer in self._ask("facts", requests, _FACTS_S).items():
            read = self._read(name, HostFacts, answer["facts"])
            if read is not None:
                facts[name] = read
        return facts

    def _read(self, name: str, kind: type[T], value: object) -> T | None:
        """Reads what a host has sent; notes it as silent where its paceline writes it in another form."""
        try:
            read: T = typed.read(kind, value, kind.__name__)
        except ValueError as error:
            theirs = f"paceline {self._versions.get(name)} there, {VERSION} here"
            self._silent[name] = f"what it sends cannot be read ({theirs}): {error}"
            self._active.pop(name, None)
            return None
        return read

    def _clocks(self) -> dict[str, Clock]:
        """Compares each host's clock with this one: of several exchanges the one with the shortest round trip counts."""
        clocks: dict[str, Clock] = {}
        for name in list(self._active):
            for _ in range(_CLOCK_TRIALS):
                begun, begun_at = time.monotonic(), time.time()
                answer = self._ask("clock", {name: {"do": "clock"}}, _CLOCK_S).get(name)
                if answer is None:
                    break
                trip = time.monotonic() - begun
                clock = Clock(answer["time"] - (begun_at + trip / 2), trip / 2)
                if name not in clocks or clock.bound_s < clocks[name].bound_s:
                    clocks[name] = clock
        return clocks

    def _connections(self) -> list[Connection]:
        requests = {}
        for name in self._active:
            peers = {}
            for other in self._active:
                if other != name:
                    peers[other] = (self._addresses[other], self._ports[other])
            requests[name] = {"do": "connections", "peers": peers}
        connections = []
        for name, answer in self._ask("ports", requests, _CONNECTIONS_S).items():
            rows = [self._read(name, Connection, row) for row in answer["connections"]]
            connections += [row for row in rows if row is not None]
        return connections

    def _torch(self, facts: Mapping[str, HostFacts]) -> dict[str, HostFacts]:
        """The facts, with what needs torch."""
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

    def _links(self, connections: list[Connection]) -> list[Link]:
        """Measures pairs of hosts, those of a round at the same time: no host takes part in two of them."""
        usable = {(row.source, row.target): row for row in connections if row.outcome == "open"}
        seconds, plan = rounds(list(self._active), _LINKS_BUDGET_S)
        links: dict[Pair, Link] = {}
        self._measure(plan, seconds, usable, links)
        # A slow link is measured once more, and the better result counts: a host may have been busy for a moment.
        self._measure(slow_rounds(plan, links), seconds, usable, links)
        return list(links.values())

    def _measure(
        self,
        plan: Sequence[Sequence[Pair]],
        seconds: float,
        usable: Mapping[Pair, Connection],
        links: dict[Pair, Link],
    ) -> None:
        """Measures rounds of pairs, and keeps the better of an old and a new result."""
        for pairs in plan:
            requests = {}
            for source, target in pairs:
                way = usable.get((source, target))
                if way is not None and target in self._active:
                    place = {"target": target, "address": way.address, "port": way.port}
                    requests[source] = {"do": "measure", **place, "seconds": seconds}
            for name, answer in self._ask("links", requests, _LINK_S).items():
                link = self._read(name, Link, answer["link"])
                if link is None:
                    continue
                pair = (link.source, link.target)
                if pair not in links or links[pair].bytes_per_s < link.bytes_per_s:
                    links[pair] = link

    def _all_reduces(
        self, facts: Mapping[str, HostFacts], connections: list[Connection], links: list[Link]
    ) -> AllReduces | None:
        """All-reduces over all hosts, one process a device, or one a host where there are none."""
        names = [name for name in self._active if name in facts and facts[name].versions.torch]
        processes = {name: max(len(facts[name].devices.names), 1) for name in names}
        world_size = sum(processes.values())
        # The check of ports says what is closed; an all-reduce would wait for it in vain.
        if world_size < 2 or any(row.outcome != "open" for row in connections):
            return None
        self._progress("all-reduce")
        address = "127.0.0.1"
        if len(names) > 1:
            ways = [row.address for row in connections if row.target == names[0] and row.outcome == "open"]
            if len(set(ways)) != 1:
                return None  # not all hosts reach the first one at the same address: the check of ports says so
            address = ways[0]
        port = self._ask("all-reduce", {names[0]: {"do": "free_port"}}, _CLOCK_S).get(names[0], {}).get("port")
        if port is None:
            return None
        slowest = min((link.bytes_per_s for link in links), default=None)
        has_devices = any(facts[name].devices.names for name in names)
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
        if errors or names[0] not in answers:
            reason = errors[0] if errors else "no answer"
            return AllReduces("", world_size, error=reason)
        first = answers[names[0]]
        times = [self._read(names[0], AllReduce, row) for row in first["times"]]
        return AllReduces(first["backend"], world_size, tuple(row for row in times if row is not None))

    def _try_folder(self) -> dict[str, FolderUse]:
        """Tries the shared folder: the steps of `host/folder.py`."""
        if not self._active:
            return {}
        first = next(iter(self._active))
        self._ask_all("folder", {"do": "folder", "step": "look"}, _FOLDER_S)
        answers = self._ask("folder", {first: {"do": "folder", "step": "make"}}, _FOLDER_S)
        if first not in answers or answers[first]["result"]:
            error = answers[first]["result"] if first in answers else "it did not answer"
            return {first: FolderUse(error)}
        uses: dict[str, FolderUse] = {}
        for name, answer in self._ask_all("folder", {"do": "folder", "step": "use"}, _FOLDER_S).items():
            use = self._read(name, FolderUse, answer["result"])
            if use is not None:
                uses[name] = use
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
