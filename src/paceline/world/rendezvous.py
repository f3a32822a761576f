"""Processes become a group: `join` and `leave`.

Order of events in `join`, for more than one process:

    device      what this process computes on
    store       rank 0 listens at address:port, the others connect (or the launcher's agent listens for all)
    roll call   rank 0 sees every rank arrive, compares what they bring, and names who is missing
    group       torch.distributed is initialised over a part of the store that is new with each roll call

The roll call is why a restart works: a launcher's agent may keep its store over restarts, and the addresses that
dead processes left there would be read by the new ones. No counter tells the rounds apart (agents of several hosts
count differently), so each rank asks with a random word, and only an answer to that word counts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.env import Variable
from paceline.base.errors import Problem, WorldError
from paceline.base.log import logger, warn_once
from paceline.torch_internals.groups import default_store
from paceline.world import device as devices
from paceline.world import interface, runtime
from paceline.world.departures import announce
from paceline.world.works import finish_threads
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

DEFAULT_TIMEOUT_S = 600.0
_dist: Any = dist  # torch's stubs lack its stores and debug levels
_POLL_S = 0.01
_LINGER_S = 2.0

environment.register(
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        environment.parse_bool,
        False,
        "Whether the launcher's agent listens at MASTER_PORT.",
    ),
)


class Companion(Protocol):
    """What lives as long as this process is in its group, such as a thread that watches it."""

    def close(self, why: str) -> None:
        """Called as this process leaves, with why it does."""
        ...


C = TypeVar("C", bound=Companion)


@dataclass
class _Joined:
    """What this process holds while it is in a group."""

    store: Store
    ours: bool  # whether `join` made the group, so that `leave` may end it
    pid: int
    rank: int
    on_leave: list[Callable[[str], None]] = field(default_factory=list)
    companions: dict[type[Companion], Companion] = field(default_factory=dict)


_CONNECTED = "connected"  # how many ranks have the group up
_CONNECT_S = 10.0  # how long rank 0 waits for that as it ends
_LEFT = "left"  # how many ranks are done with it
_LEAVE_S = 3.0  # how long rank 0 waits for that
_KNOCK_S = 2.0
_UNFINISHED_S = 5.0  # how long a process waits, as it ends, for works that its script began and did not wait for
_UNFINISHED_AFTER_FAILURE_S = 0.5

_joined: _Joined | None = None
_before: dict[object, tuple[int, Callable[[], None]]] = {}  # what `leave` calls first, with the process that asked
atexit.register(lambda: leave(at_exit=True))
# Rank 0 listens for as long as it lives: a process that leaves and joins again finds its port still its own.
_stores: dict[tuple[int, str, int], Store] = {}


def join(
    world: World,
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
    device_index: int | None = None,
    store: Store | None = None,
) -> World:
    """Finds the device of this process and forms the process group of all of them.

    A group that stands already is used as it is. One process that no launcher started needs no group and gets none;
    one that was launched gets a group of one, so that `torch.distributed` answers its script.

    Args:
        world: who this process is.
        cpu: compute on the CPU even where there is an accelerator.
        backend: torch.distributed's backend; by default the device's own, with gloo for CPU tensors beside it.
        timeout_s: seconds until joining fails, and later any collective of the group; PACELINE_TIMEOUT_S, or 600.
        device_index: number of the accelerator; by default the local rank.
        store: a torch.distributed store that all ranks hold already, instead of one at the world's address.

    Returns:
        `world` with its device filled in.

    Ranks:
        All ranks call it. It returns once all have arrived; otherwise it raises within the timeout.

    Raises:
        WorldError: `device-missing`, `device-shared`, `device-mixed`, `backend-missing`, `group-mismatch`,
            `rendezvous-address`, `rendezvous-port`, `rendezvous-unreachable`, `rendezvous-missing`, `rendezvous-group`.
    """
    global _joined
    seconds = timeout(timeout_s)
    if dist.is_available() and dist.is_initialized():
        world = _adopt(world)
        device = runtime.current().device(world, cpu=cpu, index=device_index)
        devices.select(device)
        _current()
        return replace(world, device=str(device))
    device = runtime.current().device(world, cpu=cpu, index=device_index)
    devices.select(device)
    world = replace(world, device=str(device))
    if world.size == 1 and world.source == "single" and store is None:
        return world
    chosen = devices.default_backend(device, backend)
    if world.size == 1:
        own: Store = _dist.HashStore()
    else:
        root = store if store is not None else _connect(world, seconds)
        interface.keep_gloo_on_loopback(interface.meeting_address(world))
        own = _dist.PrefixStore(f"paceline/{_roll_call(root, world, device, chosen, seconds)}", root)
    if chosen == "gloo":
        _lower_debug_level()
    _initialise(world, device, chosen, own, seconds)
    own.add(_CONNECTED, 1)
    _joined = _Joined(own, ours=True, pid=os.getpid(), rank=world.rank)
    return world


def leave(at_exit: bool = False) -> None:
    """Ends the group if `join` made it; a group that the user made stays. May be called at any time, and again.

    A save in the background ends first (`before_leaving`). Runs by itself when the interpreter ends.

    Args:
        at_exit: nothing comes after it, so that works in a group of the user's are waited for too.

    Ranks:
        Every rank for itself; the others must have finished their collectives with it.
    """
    global _joined
    while _before:
        pid, call = _before.pop(next(iter(_before)))
        if pid == os.getpid():  # a forked child inherits the table, and nothing of what it speaks of
            call()
    joined, _joined = _joined, None
    if joined is None or joined.pid != os.getpid():
        return
    failure = sys.exception() or getattr(sys, "last_value", None)
    why = f"has ended: {type(failure).__name__}: {failure}" if failure is not None else "has ended, or left"
    for say_why in joined.on_leave:
        # It writes into the store; where rank 0 is gone, and the store with it, nobody is left to read it.
        with contextlib.suppress(dist.DistNetworkError):
            say_why(why)
    # A group of the user's may go on after `end_training`.
    if (joined.ours or at_exit) and store_answers(joined.store):
        # Where the store ends at this very moment, rank 0 is gone and nobody is left to read.
        with contextlib.suppress(RuntimeError):
            announce(joined.store, joined.rank, failure)
            joined.store.add(_LEFT, 1)
    if not dist.is_initialized():
        return
    if joined.ours or at_exit:
        _finish_works(failure is not None)
    if not joined.ours:
        return
    if failure is None:
        _wait_for_others(joined.store)
    # After an error peers may be gone, and NCCL would wait for them.
    if failure is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _finish_works(failed: bool) -> None:
    """Waits a while for asynchronous works that the script did not wait for; says so where some do not end."""
    if finish_threads(_UNFINISHED_AFTER_FAILURE_S if failed else _UNFINISHED_S) or failed:
        return
    logger("world").warning(
        "rank %d ends while a collective that its script began with async_op=True is not finished (waited for %g s). "
        "Keep what the call returns, call wait() on it before the script ends, and let every rank make the call.",
        dist.get_rank(), _UNFINISHED_S,
    )  # fmt: skip


def _wait_for_others(store: Store) -> None:
    """Keeps rank 0, with which the store ends, for a while: a short script may be through before others have connected,
    or made a group of their own."""
    size = dist.get_world_size()
    try:
        for key, seconds in ((_CONNECTED, _CONNECT_S), (_LEFT, _LEAVE_S)) if dist.get_rank() == 0 else ():
            until = time.monotonic() + seconds
            while store.add(key, 0) < size and time.monotonic() < until:
                time.sleep(0.01)
    except dist.DistNetworkError:  # the store has ended: nobody can be waiting for it
        return


def before_leaving(call: Callable[[], None]) -> Callable[[], None]:
    """Has `leave` call `call` first, while the group stands, and also where there is none. Returns what takes it back."""
    key = object()
    _before[key] = (os.getpid(), call)

    def forget() -> None:
        _before.pop(key, None)

    return forget


def on_leave(call: Callable[[str], None]) -> None:
    """Has `leave` call `call` first, with why this process leaves."""
    _current().on_leave.append(call)


def accompany(companion: Companion) -> None:
    """Keeps an object until this process leaves its group, in the place of an earlier one of its class."""
    _current().companions[type(companion)] = companion
    on_leave(companion.close)


def companion_of(kind: type[C]) -> C | None:
    """The object of this class that `accompany` keeps; None where there is none, as in a forked child."""
    if _joined is None or _joined.pid != os.getpid():
        return None
    return cast("C | None", _joined.companions.get(kind))


def part(name: str) -> Store:
    """A part of its own of the store behind the current group, which must stand."""
    prefixed: Store = _dist.PrefixStore(name, _current().store)
    return prefixed


def store() -> Store:
    """The store behind the current group, which must stand."""
    return _current().store


def store_answers(at: Store | None = None) -> bool:
    """Whether the store (by default that behind the current group) is still there.

    Torch prints a page of C++ frames where it finds out by itself, also in a run that has done all its work.
    """
    at = _current().store if at is None else at
    while hasattr(at, "underlying_store"):
        at = at.underlying_store
    if not isinstance(at, _dist.TCPStore):
        return True
    try:
        socket.create_connection((at.host, at.port), _KNOCK_S).close()
    except OSError:
        return False
    return True


def timeout(timeout_s: float | None = None) -> float:
    """Seconds until a collective counts as stuck: `timeout_s`, else PACELINE_TIMEOUT_S, else 600."""
    seconds = timeout_s if timeout_s is not None else environment.get("PACELINE_TIMEOUT_S")
    return DEFAULT_TIMEOUT_S if seconds is None else float(seconds)


def _current() -> _Joined:
    """What is known of the group that stands; one that the user made becomes known here."""
    global _joined
    if _joined is None or _joined.pid != os.getpid():
        _joined = _Joined(default_store(), ours=False, pid=os.getpid(), rank=dist.get_rank())
    return _joined


def _lower_debug_level() -> None:
    """torch crashes as DistributedDataParallel is made over gloo in its DETAIL mode (`Logger::set_env_variables`)."""
    if _dist.get_debug_level() != _dist.DebugLevel.DETAIL:
        return
    warn_once(
        "world",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO: over gloo torch ends with a segmentation fault in that mode. "
        "To have each collective compared between ranks, use --debug (or PACELINE_DEBUG=1) instead.",
    )
    environment.export({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    _dist.set_debug_level(_dist.DebugLevel.INFO)


def _adopt(world: World) -> World:
    """The world as the group that stands already has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if world.source == "single":
        # No launcher: the script numbered its processes itself.
        return replace(world, rank=rank, size=size, local_rank=rank, local_size=size, source="torch.distributed")
    if (world.rank, world.size) != (rank, size):
        raise WorldError(
            "group-mismatch",
            f"a process group of {size} stands already, in which this is rank {rank}; the launcher says rank "
            f"{world.rank} of {world.size}.",
            why=f"torch.distributed was initialised by the script; {world.source} set the other numbers",
            fix="drop the script's own init_process_group call, or give it the launcher's rank and world size",
        )
    return world


def _connect(world: World, seconds: float) -> Store:
    """The store at the world's address."""
    if not world.address or not world.port:
        missing = "address" if not world.address else "port"
        raise WorldError(
            "rendezvous-address",
            f"{world.size} processes are to work together, but no {missing} is known at which to meet.",
            why=f"{world.source} gave address {world.address!r} and port {world.port!r}",
            fix="set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port of it, or use `paceline launch`",
        )
    key = (os.getpid(), world.address, world.port)
    if key in _stores:
        return _stores[key]
    place = f"{world.address}:{world.port}"
    if world.rank == 0 and not environment.get("TORCHELASTIC_USE_AGENT_STORE"):
        try:
            _stores[key] = _tcp_store(world, seconds, listens=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's DistError family
            raise WorldError(
                "rendezvous-port",
                f"rank 0 cannot listen at {place}.",
                why=[str(error).splitlines()[0], f"address and port come from {world.source}"],
                fix="choose another port (--main-port, MASTER_PORT), or end the process that holds this one",
            ) from error
        return _stores[key]
    # Where something else listens at the port and says nothing, torch waits without end: so wait beside it.
    outcome: list[Store | RuntimeError] = []
    thread = threading.Thread(target=_connect_to, args=(world, seconds, outcome), daemon=True)
    thread.start()
    thread.join(seconds + _POLL_S)
    if not outcome or isinstance(outcome[0], RuntimeError):
        reason = str(outcome[0]).splitlines()[0] if outcome else "something listens there, but it is no store of torch"
        raise WorldError(
            "rendezvous-unreachable",
            f"rank {world.rank} could not reach rank 0 at {place} within {seconds:g} s.",
            why=[_resolution(world.address), reason],
            fix="check that rank 0 runs, that MASTER_ADDR names its host, and that no firewall closes the port",
        )
    _stores[key] = outcome[0]
    return outcome[0]


def _connect_to(world: World, seconds: float, outcome: list[Store | RuntimeError]) -> None:
    """Puts the store, or the error, into `outcome`."""
    try:
        outcome.append(_tcp_store(world, seconds, listens=False))
    except RuntimeError as error:
        outcome.append(error)


def _tcp_store(world: World, seconds: float, *, listens: bool) -> Store:
    limit, address = timedelta(seconds=seconds), interface.meeting_address(world)
    # Left to itself, torch's store listens on all interfaces, and anybody who reaches it may read and change all keys.
    listener = interface.listen(address, world.port or 0) if listens else None
    store: Store = _dist.TCPStore(
        address, world.port, world.size, listens, timeout=limit, wait_for_workers=False, master_listen_fd=listener
    )
    return store


def _resolution(address: str) -> str:
    try:
        return f"{address} is {socket.getaddrinfo(address, None)[0][4][0]}, seen from {socket.gethostname()}"
    except (OSError, UnicodeError) as error:
        return f"{socket.gethostname()} cannot resolve {address!r}: {error}"


def _roll_call(store: Store, world: World, device: torch.device, backend: str, seconds: float) -> str:
    """Waits until all ranks of this round are there; gives the word that names the round.

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
    """Rank 0's half: answer each rank until it says that it heard, then compare what all bring, and decide."""
    this_round = str(mine["word"])
    present = {0: mine}  # who has called, and with what; perhaps a dead process of an earlier round
    here = {0}  # who has answered in this round
    while len(here) < world.size and time.monotonic() < deadline:
        for rank in range(1, world.size):
            if rank in here or not store.check([f"roll/{rank}"]):
                continue
            # An entry may be a dead process's, or of an earlier round; the living rank overwrites it.
            entry = json.loads(store.get(f"roll/{rank}"))
            if rank not in present or present[rank]["word"] != entry["word"]:
                present[rank] = entry
                store.set(f"seen/{entry['word']}", this_round)
            elif store.check([f"here/{this_round}/{rank}"]):
                here.add(rank)
        time.sleep(_POLL_S / 10)
    missing = sorted(set(range(world.size)) - here)
    problems = [_missing(world, missing, seconds)] if missing else _compare(present)
    verdict = [[problem.code, problem.what, problem.why, problem.fix] for problem in problems]
    store.set(f"verdict/{this_round}", json.dumps(verdict))
    if problems:
        _linger(store, [f"heard/{this_round}/{rank}" for rank in here - {0}])
        raise WorldError.of(problems)
    return this_round


def _answer(store: Store, world: World, mine: dict[str, Any], deadline: float, seconds: float) -> str:
    """Another rank's half: say who is there, and take rank 0's word for the round."""
    store.set(f"roll/{world.rank}", json.dumps(mine))
    # Rank 0 may have started later; it knows who is missing, so let it speak first.
    deadline += _LINGER_S
    this_round = _await(store, f"seen/{mine['word']}", world, deadline, seconds)
    store.set(f"here/{this_round}/{world.rank}", "1")
    verdict = json.loads(_await(store, f"verdict/{this_round}", world, deadline, seconds))
    if verdict:
        store.set(f"heard/{this_round}/{world.rank}", "1")
        raise WorldError.of(Problem(*entry) for entry in verdict)
    return this_round


def _await(store: Store, key: str, world: World, deadline: float, seconds: float) -> str:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise WorldError(
                "rendezvous-missing",
                f"rank {world.rank} of {world.size} waited {seconds:g} s for all ranks to arrive.",
                why="rank 0 did not answer, or is itself waiting for other ranks",
                fix="look at the output of rank 0, which names the ranks that it misses",
            )
        time.sleep(_POLL_S / 10)
    return bytes(store.get(key)).decode()


def _linger(store: Store, keys: list[str]) -> None:
    """Lets rank 0, with which the store may vanish, stay until the others have heard why."""
    until = time.monotonic() + _LINGER_S
    while keys and not store.check(keys) and time.monotonic() < until:
        time.sleep(_POLL_S)


def _missing(world: World, ranks: list[int], seconds: float) -> Problem:
    names = ", ".join(map(str, ranks))
    return Problem(
        "rendezvous-missing",
        f"of {world.size} processes, {len(ranks)} did not arrive within {seconds:g} s: rank {names}.",
        why=f"WORLD_SIZE is {world.size} ({world.source}); rank 0 waits at {world.address}:{world.port}",
        fix="start the missing processes, or set WORLD_SIZE to what runs; their own output may say why they ended",
    )


def _compare(present: dict[int, dict[str, Any]]) -> list[Problem]:
    """What cannot work together: other sizes, other kinds of device, one device taken twice."""
    problems = []
    sizes = [f"rank {rank}: {entry['size']}" for rank, entry in sorted(present.items())]
    if len({entry["size"] for entry in present.values()}) > 1:
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
    for rank, entry in sorted(present.items()):
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
    for rank, entry in present.items():
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


def _initialise(world: World, device: torch.device, backend: str, store: Store, seconds: float) -> None:
    # A backend that is bound to its device connects at once (NCCL); gloo serves the CPU beside it, and is not bound.
    bound = device if device.index is not None and not backend.endswith("gloo") else None
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
            device_id=bound,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            "rendezvous-group",
            f"the {world.size} processes have met, but could not connect with each other over {backend}.",
            why=str(error).splitlines()[0],
            fix="name the network card that all hosts share in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs)",
        ) from error


@contextlib.contextmanager
def _store_errors(world: World, seconds: float) -> Iterator[None]:
    """A store that breaks off means that rank 0, or the launcher's agent, has ended."""
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
