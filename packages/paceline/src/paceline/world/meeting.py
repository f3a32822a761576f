"""`meet`: the processes of a run find each other, and initialise torch.distributed.

    store       rank 0 listens at address:port, the others connect (`tcp_store.py`)
    roll call   rank 0 waits for every rank, compares what they report, and names those that are missing (`roll_call.py`)
    group       torch.distributed is initialised over a part of the store that is new with each roll call

`rendezvous.join` calls it, and keeps what it returns.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.base.log import warn_once
from paceline.world import children
from paceline.world.network import interface, tcp_store
from paceline.world.roll_call import roll_call
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_dist: Any = dist  # torch's stubs lack its stores and debug levels


def meet(world: World, device: torch.device, chosen: str, seconds: float, store: Store | None) -> Store:
    """Forms the process group of all processes, and returns its part of the store.

    Args:
        world: who this process is.
        device: on which it computes.
        chosen: the backend of torch.distributed.
        seconds: until joining fails, and later any collective of the group.
        store: a store that all ranks hold already; None connects to one at the world's address.

    Ranks:
        All ranks call it.

    Raises:
        WorldError: see `rendezvous.join`.
    """
    if world.size == 1:
        own: Store = _dist.HashStore()
    else:
        root = store
        if root is None:
            root = tcp_store.connect(world, seconds)
        children.refuse(root, world.rank)
        # Before the group is created: gloo reads the name of the network card then.
        interface.keep_gloo_on_loopback(interface.meeting_address(world))
        # The prefix hides what an earlier group has left in the same store, such as addresses of dead processes.
        this_round = roll_call(root, world, device, chosen, seconds)
        children.sign(root, world.rank)
        own = _dist.PrefixStore(f"paceline/{this_round}", root)
    if chosen == "gloo":
        _lower_debug_level()
    initialise(world, device, chosen, own, seconds)
    return own


def _lower_debug_level() -> None:
    """Lowers torch's debug level from DETAIL to INFO.

    With DETAIL torch crashes over gloo where a script itself puts torch's DistributedDataParallel around a model
    (`Logger::set_env_variables`).
    """
    if _dist.get_debug_level() != _dist.DebugLevel.DETAIL:
        return
    warn_once(
        "world",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO: over gloo torch ends with a segmentation fault in that mode. "
        "To have each collective compared between ranks, use --debug (or PACELINE_DEBUG=1) instead.",
    )
    environment.export({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    _dist.set_debug_level(_dist.DebugLevel.INFO)


def initialise(world: World, device: torch.device, backend: str, store: Store, seconds: float) -> None:
    # With `device_id` NCCL connects now, and not at the first collective, so that a failure shows here. gloo is not
    # bound to a device.
    bound = None
    if device.index is not None and not backend.endswith("gloo"):
        bound = device
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
