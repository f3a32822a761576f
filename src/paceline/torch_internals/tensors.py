"""What tensors and operations keep in private: views, hooks, memory, versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._base is not None


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on the tensor, and not taken back."""
    return bool(tensor._backward_hooks)


def gradient_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """The functions of `register_hook` and `register_post_accumulate_grad_hook` that stand on the tensor."""
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for table in tables for hook in (table or {}).values()]


def times_written(tensor: Tensor) -> int:
    """How often operations have written to the tensor, or to one that shares its memory as a view, in place."""
    return tensor._version


def multiply_in_place(tensors: list[Tensor], factor: float) -> None:
    """Multiplies all tensors, of which there is at least one, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def memory_of(tensor: Tensor) -> int:
    """Identifies the memory that tensors share, also on the meta device, where there is none and addresses are 0."""
    return tensor.untyped_storage()._cdata


def is_seen_by_a_mode() -> bool:
    """Whether some `TorchDispatchMode` sees the operations that run, such as that of selective recomputation."""
    return _get_current_dispatch_mode() is not None


def dtensor(part: Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]) -> Tensor:
    """This rank's part, wherever it lies, as a DTensor of the whole `shape`.

    The public `from_local` moves a part that was offloaded to the mesh's device, and takes ten times as long.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), part.dtype))
    return DTensor(part, spec, requires_grad=False)
