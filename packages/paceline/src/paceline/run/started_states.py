"""States that an optimizer has before it is prepared, as where a script has loaded a checkpoint of plain PyTorch."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.parallel.data.averages import broadcast_tensors
from paceline.world.collectives import Collectives
from paceline.world.param_groups import inner_optimizers, parameters_of
from paceline.world.sharded import is_sharded
from paceline.world.tree import describe, tensors


def take_first_ranks_states(optimizer: Optimizer, collectives: Collectives) -> None:
    """Gives all ranks the states that rank 0 has, as they get its parameters. Ranks: all.

    Raises:
        PrepareError: `optimizer-started`, if ranks have states of other parameters, or other ones.
    """
    by_rank = collectives.gather_object(_described(optimizer))
    if not any(map(any, by_rank)):
        return  # where stages of a pipeline are prepared again, ranks have other parameters
    others = [rank for rank, states in enumerate(by_rank) if states != by_rank[0]]
    if others:
        counts = [sum(map(bool, states)) for states in by_rank]
        raise PrepareError(
            "optimizer-started",
            f"{type(optimizer).__name__} has other states on rank {others[0]} than on rank 0.",
            why=f"before `prepare` it has states of {counts[0]} parameters on rank 0, and of {counts[others[0]]} on rank "
            f"{others[0]}",
            fix="load the same states into it on all ranks, and not on one; or load them after `prepare`, on all ranks",
        )
    # Those on the meta device are created in a constructor, and get their values with the model. Those of another prepared
    # optimizer may be divided already.
    with_values = [
        tensor
        for tensor in tensors(_states(optimizer))
        if tensor.numel() and not tensor.is_meta and not is_sharded(tensor)
    ]
    for device in dict.fromkeys(tensor.device for tensor in with_values):
        broadcast_tensors([tensor for tensor in with_values if tensor.device == device], collectives.group)


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the states of all parameters, in the order of the groups, those of optimizers inside of it too."""
    states = []
    for each in (optimizer, *inner_optimizers(optimizer)):
        states += [each.state.get(parameter, {}) for parameter in parameters_of(each)]
    return states


def _described(optimizer: Optimizer) -> list[str]:
    """Returns what the state of each parameter consists of, in one line; "" for a parameter without one."""
    return [describe(state) if state else "" for state in _states(optimizer)]
