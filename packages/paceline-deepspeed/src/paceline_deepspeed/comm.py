"""`deepspeed.comm`: torch.distributed under DeepSpeed's signatures, whose last arguments only its own log needs.

The group is up after `deepspeed.init_distributed()` or `deepspeed.initialize()`, at one process too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, ReduceOp

from paceline.base import env as environment
from paceline.base.log import warn_once
from paceline.world import rendezvous
from paceline.world.world import World
from paceline_deepspeed import profiling
from paceline_deepspeed.device import get_accelerator

__all__ = ["P2POp", "ProcessGroup", "ReduceOp"]

_LOGGED = ("prof", "log_name", "debug")  # of DeepSpeed's log; ours sees every call without them


def _served(function: Callable[..., Any], **torch_names: str) -> Callable[..., Any]:
    """Wraps a function of torch's so that it takes DeepSpeed's arguments.

    Args:
        torch_names: for arguments that DeepSpeed calls otherwise, the names that torch has.
    """

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        arguments = {}
        # Positions are the same in both libraries up to the arguments of the log, which come last and by name.
        for name, value in keywords.items():
            if name not in _LOGGED:
                arguments[torch_names.get(name, name)] = value
        return function(*args, **arguments)

    return call


all_reduce = _served(dist.all_reduce)


def inference_all_reduce(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Reduces a tensor in place over all ranks, and returns it. Ranks: all."""
    all_reduce(tensor, *args, **keywords)
    return tensor


all_gather = _served(dist.all_gather)
all_gather_object = _served(dist.all_gather_object)
# torch renamed two of them, and warns of the old names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into_tensor = _served(_gather_single, tensor="input_tensor")
allgather_fn = all_gather_into_tensor
reduce_scatter = _served(dist.reduce_scatter)
reduce_scatter_tensor = _served(_scatter_single, output_tensor="output", tensor="input")
reduce_scatter_fn = reduce_scatter_tensor
all_to_all = _served(dist.all_to_all)
all_to_all_single = _served(dist.all_to_all_single, tensor="input")
broadcast = _served(dist.broadcast)
broadcast_object_list = _served(dist.broadcast_object_list)
reduce = _served(dist.reduce)
gather = _served(dist.gather)
scatter = _served(dist.scatter)
send = _served(dist.send)
recv = _served(dist.recv)
isend = _served(dist.isend)
irecv = _served(dist.irecv)
batch_isend_irecv = _served(dist.batch_isend_irecv)
barrier = _served(dist.barrier)
is_available = dist.is_available
is_initialized = dist.is_initialized
get_rank = dist.get_rank
get_world_size = dist.get_world_size


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    **logged: object,
) -> Any:
    """Reduces each of some tensors in place. Ranks: all of the group."""
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    if not async_op:
        return None
    return _Works(works)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gathers each of some tensors. Ranks: all of the group."""
    works = []
    for output, part in zip(output_tensors, input_tensors, strict=True):
        works.append(_gather_single(output, part, group, async_op))
    if not async_op:
        return None
    return _Works(works)


class _Works:
    """Several operations that are under way."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **logged: object
) -> None:
    """Waits for all ranks; where the backend can, it names those that do not come. Ranks: all of the group."""
    # Of torch's backends only gloo can name the ranks that are missing.
    if dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, timeout, wait_all_ranks)
    else:
        dist.barrier(group)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends a group; without one, leaves the group of all. Ranks: all."""
    if group is None:
        rendezvous.leave()
    # `leave` ends only a group that was formed here, and not one that the script formed itself.
    if group is not None or dist.is_initialized():
        dist.destroy_process_group(group)


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """Forms a group of some ranks. Ranks: all."""
    return dist.new_group(ranks)


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Returns the number among all ranks of a rank of a group."""
    if group is None:
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def get_world_rank_from_launcher() -> int:
    return World.detect().rank


def get_local_rank() -> int:
    return World.detect().local_rank


get_local_rank_from_launcher = get_local_rank


def get_world_size_from_launcher() -> int:
    return World.detect().size


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Returns torch's `DeviceMesh` of all ranks. Ranks: all."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switches the log of an engine's communication on or off, where its config asked for one.

    Args:
        enabled: whether calls are recorded from here on.
        deepspeed_config, prof_all, prof_ops, verbose, debug: what the config's `comms_logger` says counts; others warn.
    """
    others = {"prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    given = [name for name, value in others.items() if value is not None]
    log = profiling.communication_log()
    if log is not None and enabled is not None:
        if enabled:
            log.start()
        else:
            log.stop()
    if given or (log is None and enabled is not False):
        warn_once(
            "compat",
            f"deepspeed.comm.configure({', '.join(given)}) makes no log: write a `comms_logger` block into the config of "
            "`initialize`, or run `paceline launch --profile comms`.",
        )


def get_logged_comm_ops() -> list[str]:
    """Lists the names of the operations that were recorded; none without a log."""
    log = profiling.communication_log()
    if log is None:
        return []
    operations = {row.op for row in log.summary()}  # one row for each size of message
    return sorted(operations)


def has_comm_data() -> bool:
    """Whether anything was recorded."""
    return bool(get_logged_comm_ops())


def reset_log() -> None:
    """Forgets what was recorded."""
    log = profiling.communication_log()
    if log is not None:
        log.reset()


def in_aml() -> bool:
    """Whether Azure Machine Learning started this process."""
    return "AZUREML_EXPERIMENT_ID" in environment.snapshot()


def in_aws_sm() -> bool:
    """Whether SageMaker started this process."""
    return "SM_TRAINING_ENV" in environment.snapshot()


def in_dlts() -> bool:
    """Whether a DLTS cluster started this process."""
    return "DLTS_JOB_ID" in environment.snapshot()


def has_all_gather_into_tensor() -> bool:
    """Returns True: every torch that is supported has it, and the three below."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor
