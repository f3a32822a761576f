"""The private side of fake tensors, which have a form and a device and no values."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """A fake tensor on the CPU, of the shape, strides and dtype of `tensor`, that `torch.utils.swap_tensors` can take.

    What operations of the mode return it cannot from torch 2.15 on: the mode keeps a weak reference to each of them.
    """
    with _disable_current_modes():
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, form, torch.device("cpu"))
