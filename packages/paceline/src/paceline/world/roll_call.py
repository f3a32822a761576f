"""The roll call: rank 0 waits for every rank, compares what they report, and names those that are missing.

    rank 0     reads roll/RANK of each rank -> writes seen/WORD, the name of the round -> writes verdict/ROUND, once all confirm
    others     write roll/RANK, with a random word -> read seen/WORD -> write here/ROUND/RANK -> read verdict/ROUND

A restart needs the roll call. A launcher's agent may keep its store over restarts, and new processes must not read the
addresses that dead ones left there. A counter cannot tell the rounds apart, because agents of several hosts count
differently. So each rank asks with a random word, and only an answer to that word counts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import Problem, WorldError
from paceline.base.log import logger
from paceline.base.wording import ranks_text
from paceline.world import device as devices
from paceline.world.network.tcp_store import NOTICE_S
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_LEAST_PAUSE_S = 0.001  # between two looks into the store
_MOST_RETRY_S = 1.0
_RETRY_S = 0.05  # how long rank 0 first waits for the answers, before it looks whether a rank has called anew
_LINGER_S = 2.0  # how long rank 0 stays after an error, so that the others can read it


def roll_call(store: Store, world: World, device: torch.device, backend: str, seconds: float) -> str:
    """Waits until all ranks of this round have arrived. Returns the word that names the round.

    Ranks:
        All. Rank 0 decides and every rank gets the same word, or the same error.
    """
    deadline = time.monotonic() + seconds
    asked = {
        "word": secrets.token_hex(8),
        "host": socket.gethostname(),
        "size": world.size,
        "device": device.type,
        "backend": backend,
        "identity": devices.identity(device),
    }
    with _store_errors(world, seconds):
        if world.rank == 0:
            return _call(store, world, asked, deadline, seconds)
        return _answer(store, world, asked, deadline, seconds)


def _call(store: Store, world: World, mine: dict[str, Any], deadline: float, seconds: float) -> str:
    """Rank 0's part: it answers each rank until that rank confirms, compares what all have reported, and decides.

    It asks the store for all ranks in one request, so that the number of requests does not grow with the number of ranks.
    """
    this_round = str(mine["word"])
    others = range(1, world.size)
    # What each rank has reported. The entry may be that of a dead process of an earlier round, until its successor writes.
    reports = {0: mine}
    unconfirmed = set(others)  # ranks that have not confirmed in this round
    calls = {rank: f"roll/{rank}" for rank in others}
    all_have_called = _wait(store, list(calls.values()), min(deadline, time.monotonic() + NOTICE_S))
    if not all_have_called and time.monotonic() < deadline:
        missing = [rank for rank, key in calls.items() if not store.check([key])]
        logger("world").warning(
            "rank 0 has waited %g s for %s of %d at %s:%s, and waits %.0f s more.",
            NOTICE_S, ranks_text(missing), world.size, world.address, world.port, deadline - time.monotonic(),
        )  # fmt: skip
        all_have_called = _wait(store, list(calls.values()), deadline)
    pause = _RETRY_S if all_have_called else _MOST_RETRY_S
    while unconfirmed:
        called = list(unconfirmed)
        if not all_have_called:
            called = [rank for rank in unconfirmed if store.check([f"roll/{rank}"])]
        _tell_round(store, called, reports, this_round)
        confirmations = {rank: f"here/{this_round}/{rank}" for rank in called}
        all_have_confirmed = _wait(store, list(confirmations.values()), time.monotonic() + pause)
        for rank, key in confirmations.items():
            if all_have_confirmed or store.check([key]):
                unconfirmed.discard(rank)
        if time.monotonic() > deadline:
            break
        pause = min(2 * pause, _MOST_RETRY_S)
    if unconfirmed:
        problems = [_missing(world, sorted(unconfirmed), seconds)]
    else:
        problems = compare(reports)
    verdict = [[problem.code, problem.what, problem.why, problem.fix] for problem in problems]
    store.set(f"verdict/{this_round}", json.dumps(verdict))
    if problems:
        # The store may end with this process, so the others read the verdict before.
        heard = [f"heard/{this_round}/{rank}" for rank in others if rank not in unconfirmed]
        _wait(store, heard, time.monotonic() + _LINGER_S)
        raise WorldError.of(problems)
    return this_round


def _tell_round(store: Store, called: list[int], reports: dict[int, dict[str, Any]], this_round: str) -> None:
    """Answers the words of the ranks that have called, except those that were answered before."""
    if not called:
        return
    words = []
    contents = store.multi_get([f"roll/{rank}" for rank in called])
    for rank, content in zip(called, contents, strict=True):
        # An entry may be a dead process's, or of an earlier round; the living rank overwrites it.
        entry = json.loads(content)
        if rank not in reports or reports[rank]["word"] != entry["word"]:
            reports[rank] = entry
            words.append(entry["word"])
    if words:
        rounds = [this_round] * len(words)
        store.multi_set([f"seen/{word}" for word in words], rounds)  # type: ignore[attr-defined]  # missing in torch's stubs


def _answer(store: Store, world: World, mine: dict[str, Any], deadline: float, seconds: float) -> str:
    """The part of every other rank: it reports itself, and waits for the name of the round and for rank 0's verdict."""
    store.set(f"roll/{world.rank}", json.dumps(mine))
    # Rank 0 may have started later. Its error names the missing ranks, so this rank waits a little longer than rank 0.
    deadline += _LINGER_S
    this_round = _await(store, f"seen/{mine['word']}", world, deadline, seconds)
    store.set(f"here/{this_round}/{world.rank}", "1")
    verdict = json.loads(_await(store, f"verdict/{this_round}", world, deadline, seconds))
    if verdict:
        store.set(f"heard/{this_round}/{world.rank}", "1")
        raise WorldError.of(Problem(*entry) for entry in verdict)
    return this_round


def _await(store: Store, key: str, world: World, deadline: float, seconds: float) -> str:
    if not _wait(store, [key], deadline):
        raise WorldError(
            "rendezvous-missing",
            f"rank {world.rank} of {world.size} waited {seconds:g} s for all ranks to arrive.",
            why="rank 0 did not answer, or is itself waiting for other ranks",
            fix="look at the output of rank 0, which names the ranks that it misses",
        )
    return bytes(store.get(key)).decode()


def _wait(store: Store, keys: list[str], deadline: float) -> bool:
    """Waits for keys. Returns whether all of them were there before `deadline`.

    Each pause is a tenth of the time waited so far: a thousand ranks that ask every millisecond keep the store too busy to
    let the others connect. The store's own `wait` needs no polling, but no signal ends it, and torch prints a long message
    when it times out.
    """
    started = time.monotonic()
    while keys and not store.check(keys):
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(max(_LEAST_PAUSE_S, (now - started) / 10))
    return True


def _missing(world: World, ranks: list[int], seconds: float) -> Problem:
    names = ", ".join(map(str, ranks))
    return Problem(
        "rendezvous-missing",
        f"of {world.size} processes, {len(ranks)} did not arrive within {seconds:g} s: rank {names}.",
        why=f"WORLD_SIZE is {world.size} ({world.source}); rank 0 waits at {world.address}:{world.port}",
        fix="start the missing processes, or set WORLD_SIZE to what runs; their own output may say why they ended",
    )


def compare(reports: dict[int, dict[str, Any]]) -> list[Problem]:
    """Returns what cannot work together: different world sizes, different kinds of device, or a device used twice."""
    problems = []
    sizes = [f"rank {rank}: {entry['size']}" for rank, entry in sorted(reports.items())]
    if len({entry["size"] for entry in reports.values()}) > 1:
        problems.append(
            Problem(
                "group-mismatch",
                "ranks disagree about how many processes there are.",
                ", ".join(sizes),
                "give every process the same WORLD_SIZE",
            )
        )
    kinds: set[str] = set()
    devices_by_rank = []
    for rank, entry in sorted(reports.items()):
        kind = f"{entry['device']} ({entry['backend']})"
        kinds.add(kind)
        devices_by_rank.append(f"rank {rank} on {entry['host']}: {kind}")
    if len(kinds) > 1:
        problems.append(
            Problem(
                "device-mixed",
                "ranks compute on different kinds of device.",
                ", ".join(devices_by_rank),
                "run them all on the CPU with cpu=True, or make the accelerator visible to each",
            )
        )
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, entry in reports.items():
        # gloo lets several ranks share a device; NCCL does not.
        if entry["identity"] and "gloo" not in entry["backend"].split(",")[-1]:
            owners.setdefault((entry["host"], entry["identity"]), []).append(rank)
    for (host, identity), ranks in owners.items():
        if len(ranks) > 1:
            problems.append(
                Problem(
                    "device-shared",
                    f"ranks {', '.join(map(str, sorted(ranks)))} share one device.",
                    f"device {identity} of host {host}",
                    "start one process for each device",
                )
            )
    return problems


@contextlib.contextmanager
def _store_errors(world: World, seconds: float) -> Iterator[None]:
    """Turns an error of the store into one that says what it means: rank 0, or the launcher's agent, has ended."""
    try:
        yield
    except WorldError:
        raise
    except RuntimeError as error:
        raise WorldError(
            "rendezvous-unreachable",
            f"rank {world.rank} lost the store at {world.address}:{world.port} while the processes were gathering.",
            why=str(error).splitlines()[0],
            fix="look at the output of rank 0 (or of the launcher): it has ended",
        ) from error
