"""(b) How long n ranks take to meet. Each rank is a thread with a connection to the store of its own, and runs the real code.

    ours        every rank takes part in the roll call
    torchrun    every agent (one for 8 ranks) runs torch's c10d rendezvous and its assignment of ranks, and then every rank
                waits at the store until all have come, as `init_process_group` does

Neither side imports torch in a rank, opens connections between ranks, or starts a process. The connections to the store stand
already.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from paceline.testing import run_ranks
from paceline.world.roll_call import roll_call
from paceline.world.world import World
from scale import growth

SIZES = (16, 64, 256, 1024)
PROCESSES = 4  # which share the threads
RANKS_PER_HOST = 8
LIMIT_S = 300.0
Store = Any


def connect(port: int) -> Store:
    """A connection of one rank's own."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: Store, requests: Counter[str]) -> None:
        self._store = store
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self._requests[threading.current_thread().name] += 1
            return call(*arguments)

        return counted


def our_rank(rank: int, size: int, connection: Store, requests: Counter[str]) -> None:
    """What `rendezvous.join` does before it makes the group."""
    world = World(rank=rank, size=size, source="benchmark")
    store: Any = Counted(connection, requests)
    roll_call(store, world, torch.device("cpu"), "gloo", LIMIT_S)


def torch_agent(rank: int, size: int, store: Store, requests: Counter[str]) -> None:
    """What an agent of torchrun does before it starts its ranks."""
    backend = C10dRendezvousBackend(Counted(store, requests), f"run-{size}")  # type: ignore[arg-type]
    agents = size // RANKS_PER_HOST
    limit = RendezvousTimeout(join=timedelta(seconds=LIMIT_S))
    handler = DynamicRendezvousHandler.from_backend(f"run-{size}", store, backend, agents, agents, "127.0.0.1", limit)
    info = handler.next_rendezvous()
    spec = SimpleNamespace(role="default", local_world_size=RANKS_PER_HOST)
    agent: Any = None
    SimpleElasticAgent._assign_worker_ranks(agent, info.store, info.rank, info.world_size, spec)  # type: ignore[arg-type]
    handler._stop_heartbeats()


def torch_rank(rank: int, size: int, connection: Store, requests: Counter[str]) -> None:
    """What a rank of torchrun does in `init_process_group`, before it makes the group."""
    store: Any = Counted(connection, requests)
    if store.add("init/arrived", 1) == size:
        store.set("init/all", "1")
    store.wait(["init/all"], timedelta(seconds=LIMIT_S))


def in_threads(work: Callable[..., None], ranks: range, size: int, port: int) -> tuple[float, int]:
    """Runs the ranks of this process beside those of the others; seconds until all are through, and most requests of one."""
    requests: Counter[str] = Counter()
    errors: list[BaseException] = []
    connected = threading.Semaphore(0)
    begin = threading.Event()

    def run(rank: int) -> None:
        try:
            # Not timed: torch asks for the name of each address, which takes as long as the resolver pleases.
            connection = connect(port)
            connected.release()
            begin.wait()
            work(rank, size, connection, requests)
        except BaseException as error:
            errors.append(error)
            connected.release()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    for _ in threads:
        connected.acquire()
    dist.barrier()
    started = time.perf_counter()
    begin.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    dist.barrier()
    return time.perf_counter() - started, max(requests.values(), default=0)


def measure(size: int) -> dict[str, tuple[float, int]]:
    """In one of the processes: seconds, and the most requests that one rank made."""
    number, processes = dist.get_rank(), dist.get_world_size()
    outcomes: dict[str, tuple[float, int]] = {}
    for side in ("ours", "torchrun"):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if number == 0 else None
        ports = [server.port if server is not None else 0]
        dist.broadcast_object_list(ports)
        ranks = range(number, size, processes)
        if side == "ours":
            outcomes[side] = in_threads(our_rank, ranks, size, ports[0])
        else:
            agents = range(number, size // RANKS_PER_HOST, processes)
            agents_s, agent_requests = in_threads(torch_agent, agents, size, ports[0])
            ranks_s, _ = in_threads(torch_rank, ranks, size, ports[0])
            outcomes[side] = agents_s + ranks_s, agent_requests
        dist.barrier()
    return outcomes


def table(sizes: tuple[int, ...] = SIZES) -> str:
    """Times by ranks, as Markdown."""
    lines = ["| ranks | ours | torchrun | ratio | requests of rank 0 | of an agent |", "|---|---|---|---|---|---|"]
    own_by_size, other_by_size = {}, {}
    for size in sizes:
        found = run_ranks(measure, PROCESSES, args=(size,), timeout_s=3 * LIMIT_S)
        own_s = max(part["ours"][0] for part in found)
        other_s = max(part["torchrun"][0] for part in found)
        own_by_size[size], other_by_size[size] = own_s, other_s
        own_requests = max(part["ours"][1] for part in found)
        other_requests = max(part["torchrun"][1] for part in found)
        lines.append(
            f"| {size} | {growth.shown(own_s)} | {growth.shown(other_s)} | {own_s / other_s:.2f} "
            f"| {own_requests} | {other_requests} |"
        )
    exponents = f"{growth.exponent(own_by_size):.2f} | {growth.exponent(other_by_size):.2f}"
    lines.append(f"| exponent | {exponents} | | | |")
    return "\n".join(lines)
