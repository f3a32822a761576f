"""`OwnedStates`: the states in `optimizer.state_dict()` where each rank has those of some parameters only.

So it is with optimizers that need whole matrices, and for the stages of a pipeline.
A file of one rank lacks the states of the others' parameters. If another rank, or a run of another width, read it, these
would begin at zero without a word, or become those of other layers. So the file says who has written it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.base.errors import CheckpointError
from paceline.parallel.whole_answers import PICKLED_BY_ONE_RANK, tell_of_parts


class OwnedStates(dict[Any, Any]):
    """States by the numbers of parameters, as in any `state_dict()`; those of this rank's parameters only."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tell_of_parts()
        return unpickled_states, (*_place(), dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedStates:
        return OwnedStates(copy.deepcopy(dict(self), memo))


def mark_states(optimizer: Optimizer) -> None:
    """Lets `optimizer.state_dict()` say that it lacks the states of parameters that other ranks step."""

    def marked(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": OwnedStates(state_dict["state"])}

    optimizer.register_state_dict_post_hook(marked)


def unpickled_states(rank: int, size: int, states: dict[Any, Any]) -> OwnedStates:
    """Makes states of what a rank of `size` has pickled, and refuses those of another one.

    Raises:
        CheckpointError: `checkpoint-part`.
    """
    own = _place()
    if own == (rank, size):
        return OwnedStates(states)
    raise CheckpointError(
        "checkpoint-part",
        "a file has the optimizer states of another rank's parameters only.",
        why=f"rank {rank} of {size} has pickled them, as by `torch.save(optimizer.state_dict(), path)`; this is rank "
        f"{own[0]} of {own[1]}",
        fix=PICKLED_BY_ONE_RANK,
    )


def _place() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


# What `torch.load` calls while it reads weights only.
torch.serialization.add_safe_globals([unpickled_states])
