"""The memory in which FSDP2 keeps a shard: flat, with the padding that makes those of all ranks equally long."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline.torch_internals.dtensor import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from paceline.torch_internals.fsdp import FSDPParam


def shard_memory(parameter: FSDPParam) -> Tensor:
    """Returns the memory of a shard, which may be a tensor of a subclass.

    Shape: (elements of the longest shard,)
    """
    return parameter._sharded_param_data


def move_shard(parameter: FSDPParam, memory: Tensor) -> bool:
    """Copies a shard to other memory, in which it is from now on; not one that is there already, or has no values yet.

    Args:
        parameter: the group parameter.
        memory: of the shape and dtype of `shard_memory`.

    Returns:
        Whether something was copied.
    """
    shard = cast("DTensor", parameter.sharded_param)
    own = local_tensor(shard)
    # Of storages, since a rank may have no rows of a parameter: a tensor without elements has no address.
    if own.is_meta or own.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        return False
    # What a script has put in the place of the shard becomes FSDP2's first.
    parameter.reset_sharded_param()
    with torch.no_grad():
        memory.copy_(parameter._sharded_param_data)
    parameter._sharded_param_data = memory
    dim = parameter.fsdp_placement.dim
    num_rows = own.size(dim) if own.numel() else 0
    shard._local_tensor = memory.view(parameter.padded_sharded_param_size).narrow(dim, 0, num_rows)
    return True
