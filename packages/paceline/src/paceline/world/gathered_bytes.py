"""Gathers divided tensors, and those of dtypes that backends do not send, such as float8 and integers of 16 bits, as bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.torch_internals.dtensor import local_tensor

# gloo sends neither these nor float8, and NCCL not all of them.
_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def gathered(tensor: DTensor) -> Tensor:
    """Returns the whole tensor. Ranks: all that have a part; all get the whole."""
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if not is_float8 and tensor.dtype not in _NOT_SENT:
        return tensor.full_tensor()
    # Its bytes are one more dim, so that the others are divided as they were.
    part = local_tensor(tensor).unsqueeze(-1).contiguous().view(torch.uint8)
    shape = torch.Size((*tensor.shape, tensor.dtype.itemsize))
    strides = torch.empty(shape, device="meta").stride()
    of_bytes = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=strides
    )
    return of_bytes.full_tensor().view(tensor.dtype).squeeze(-1)
