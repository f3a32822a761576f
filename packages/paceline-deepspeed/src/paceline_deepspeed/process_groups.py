"""`deepspeed.utils.groups`: which ranks read different samples, and which share a sequence or the layers of a model.

The groups are those of the plan. The names that begin with `_` are DeepSpeed's own, and libraries call them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.run.run import Run, live_runs

# As in DeepSpeed where a script has set up no groups of its own: a test for None or 1 must not meet a stand-in.
mesh_device = None
expert_tensor_parallel_world_size = 1


def _run() -> Run | None:
    """Returns the first run that is alive; None before `deepspeed.initialize`."""
    return next(iter(live_runs()), None)


def get_data_parallel_group() -> Any:
    """Returns the group of ranks that read different samples."""
    for run in live_runs():
        if run.mesh.data_group is not None:
            return run.mesh.data_group
    return dist.group.WORLD


def get_data_parallel_rank() -> int:
    if not dist.is_initialized():
        return 0
    return dist.get_rank(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    if not dist.is_initialized():
        return 1
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_ranks() -> list[int]:
    """Returns the ranks that read different samples, by their numbers in the whole run."""
    return dist.get_process_group_ranks(get_data_parallel_group())


def get_broadcast_src_rank() -> int:
    """Returns the first of the ranks that read different samples."""
    return dist.get_global_rank(get_data_parallel_group(), 0)


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return dist.group.WORLD


def get_model_parallel_rank() -> int:
    """Returns 0: a script has no model-parallel group of its own here; the plan divides layers."""
    return 0


def get_model_parallel_world_size() -> int:
    return 1


def get_sequence_parallel_group() -> Any:
    """Returns the group of ranks that share each sequence; None where none is shared."""
    run = _run()
    if run is None or run.plan.layout.cp == 1:
        return None
    return run.mesh.group("cp")


def get_sequence_parallel_world_size() -> int:
    """Returns how many ranks share each sequence."""
    run = _run()
    return 1 if run is None else run.plan.layout.cp


def get_sequence_parallel_rank() -> int:
    """Returns which part of a sequence this rank has."""
    run = _run()
    if run is None:
        return 0
    return run.plan.layout.coordinate(run.world.rank)["cp"]


def get_sequence_data_parallel_group() -> Any:
    """Returns the group of ranks over which gradients are averaged: of different samples, or other parts of a sequence."""
    run = _run()
    if run is None or run.mesh.gradient_group is None:
        return dist.group.WORLD
    return run.mesh.gradient_group


def get_sequence_data_parallel_rank() -> int:
    if not dist.is_initialized():
        return 0
    return dist.get_rank(get_sequence_data_parallel_group())


def get_sequence_data_parallel_world_size() -> int:
    if not dist.is_initialized():
        return 1
    return dist.get_world_size(get_sequence_data_parallel_group())
