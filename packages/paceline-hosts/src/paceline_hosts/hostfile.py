"""The hosts and slots of a run: a hostfile, filtered by `--include`, `--exclude` and the numbers of hosts and processes.

    node0 slots=4    # a name that ssh knows, and how many processes it may run
    node1 slots=4

A filter is `HOST[:SLOT,SLOT...][@HOST...]`; a host alone means all its slots. Hosts keep the order of the file, and so do
their ranks. The functions are pure, except `text_of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import ConfigError, Problem
from paceline.config.given import nearest

_LINE = re.compile(r"(?P<host>[A-Za-z0-9_][\w.@-]*)\s+slots=(?P<slots>[1-9][0-9]*)")
_FORM = "expected: HOST slots=N, such as `node0 slots=4`"
_MOST_SLOTS = 4096  # of one host: each is a process


@dataclass(frozen=True)
class Slots:
    """One host and its slots that are used: one process for each, on the accelerator with that number if there are any."""

    host: str
    ids: tuple[int, ...]


def read(text: str, where: str) -> tuple[Slots, ...]:
    """Returns the hosts of a hostfile.

    Args:
        text: what it holds.
        where: its name, for messages.

    Raises:
        ConfigError: `hostfile`, with each line that is wrong.
    """
    hosts: dict[str, Slots] = {}
    line_of: dict[str, int] = {}
    problems = []
    fix = "write each host once, with its slots; `#` begins a comment"
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            problems.append(Problem("hostfile", f"{where}:{number}: {words[:80]!r} names no host.", _FORM, fix))
        elif len(match["slots"]) > len(str(_MOST_SLOTS)) or int(match["slots"]) > _MOST_SLOTS:
            what = f"{where}:{number} gives a host more than {_MOST_SLOTS} slots."
            problems.append(Problem("hostfile", what, f"slots={match['slots'][:20]}", f"write {_MOST_SLOTS} or fewer"))
        elif match["host"] in hosts:
            why = f"{where}:{line_of[match['host']]} and {where}:{number}"
            problems.append(Problem("hostfile", f"the host {match['host']} is listed twice.", why, fix))
        else:
            line_of[match["host"]] = number
            hosts[match["host"]] = Slots(match["host"], tuple(range(int(match["slots"]))))
    if not hosts and not problems:
        problems.append(Problem("hostfile", f"{where} names no host.", _FORM, fix))
    if problems:
        raise ConfigError.of(problems)
    return tuple(hosts.values())


def text_of(path: str) -> str:
    """Returns the text of a hostfile.

    Raises:
        ConfigError: `hostfile`, where it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not text"
        if isinstance(error, OSError):
            why = (error.strerror or "").lower()
        fix = "write one: a line `HOST slots=N` for each host"
        raise ConfigError("hostfile", f"the hostfile {path} cannot be read.", why, fix) from None


def choose(
    hosts: Sequence[Slots],
    *,
    include: str = "",
    exclude: str = "",
    nodes: int | None = None,
    procs: int | None = None,
    open_ended: bool = False,
) -> tuple[Slots, ...]:
    """Returns the hosts and slots that are used.

    Args:
        hosts: all that there are.
        include: a filter that names those; "" for all.
        exclude: a filter that names those left out.
        nodes: the first so many hosts.
        procs: slots 0 to `procs - 1` on each host, however many it has.
        open_ended: whether a host has every slot that is requested, as a host without accelerators has.

    Raises:
        ConfigError: `host-filter`; all that is wrong at once.
    """
    problems = list(_conflicts(include, exclude, nodes, procs))
    slots_by_host = {slots.host: slots for slots in hosts}
    slots_of_filter: dict[str, tuple[int, ...]] = {}
    if not problems:
        flag = "--include" if include else "--exclude"
        slots_of_filter = _parsed(include or exclude, flag, slots_by_host, problems, open_ended)
    if nodes is not None and nodes > len(hosts):
        there_are = "there is" if len(hosts) == 1 else "there are"
        problems.append(
            Problem(
                "host-filter",
                f"{nodes} hosts are asked for, and {there_are} {len(hosts)}.",
                f"hosts: {', '.join(slots_by_host)}",
                "add hosts to the hostfile, or ask for fewer",
            )
        )
    if problems:
        raise ConfigError.of(problems)
    if procs is not None:
        hosts = [Slots(slots.host, tuple(range(procs))) for slots in hosts]
    chosen = []
    for slots in hosts[:nodes]:
        filtered = slots_of_filter.get(slots.host)
        if include and filtered is not None:
            chosen.append(Slots(slots.host, filtered or slots.ids))
        elif not include and filtered is None:
            chosen.append(slots)
        elif not include and filtered:  # a host that is excluded without numbers is left out with all its slots
            left = [number for number in slots.ids if number not in filtered]
            chosen.append(Slots(slots.host, tuple(left)))
    chosen = [slots for slots in chosen if slots.ids]
    if not chosen:
        raise ConfigError("host-filter", "no slot is left.", f"--exclude {exclude}", "exclude fewer")
    return tuple(chosen)


def _conflicts(include: str, exclude: str, nodes: int | None, procs: int | None) -> list[Problem]:
    """Returns the problems with flags that exclude each other."""
    filters = []
    if include:
        filters.append(f"--include {include}")
    if exclude:
        filters.append(f"--exclude {exclude}")
    counts = []
    if nodes is not None:
        counts.append(f"{nodes} hosts")
    if procs is not None:
        counts.append(f"{procs} processes a host")
    problems = []
    if len(filters) == 2:
        what = "--include and --exclude cannot both be given."
        problems.append(Problem("host-filter", what, filters, "say with one of them what is used"))
    if filters and counts:
        what = f"{filters[0].split()[0]} and a number of hosts or processes cannot both be given."
        problems.append(Problem("host-filter", what, [*filters, *counts], "name the hosts and slots, or give numbers"))
    return problems


def _parsed(
    text: str, flag: str, slots_by_host: Mapping[str, Slots], problems: list[Problem], open_ended: bool
) -> dict[str, tuple[int, ...]]:
    """Returns the slots of a filter by host; () for a host without slots."""
    slots_of_filter: dict[str, tuple[int, ...]] = {}
    for part in text.split("@") if text else []:
        name, colon, numbers = part.strip().partition(":")
        if not name or (colon and not re.fullmatch(r"\d+(,\d+)*", numbers)):
            form = "expected: HOST[:SLOT,SLOT...], several joined by @"
            problems.append(Problem("host-filter", f"{flag}: {part!r} cannot be read.", form, "node0:0,1@node1"))
        elif name not in slots_by_host:
            close = nearest(name, slots_by_host)
            fix = f"write {close}" if close else "name one of these"
            problems.append(
                Problem("host-filter", f"there is no host {name!r}.", f"hosts: {', '.join(slots_by_host)}", fix)
            )
        elif name in slots_of_filter:
            problems.append(Problem("host-filter", f"{flag} names {name} twice.", text, "join its slots with commas"))
        else:
            distinct_ids = {int(number) for number in numbers.split(",") if number}
            ids = tuple(sorted(distinct_ids))
            missing = [number for number in ids if number not in slots_by_host[name].ids]
            slots_of_filter[name] = ids
            if missing and not open_ended:
                there = ",".join(map(str, slots_by_host[name].ids))
                what = f"the host {name} has no slot {', '.join(map(str, missing))}."
                problems.append(
                    Problem("host-filter", what, f"{flag} {part}; its slots: {there}", "name some of these")
                )
    return slots_of_filter
