"""What tensors, operations and optimizers keep in private: views, hooks, memory, the order of hooks, steps of Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._base is not None


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on the tensor, and not taken back."""
    return bool(tensor._backward_hooks)


def gradient_hooks(tensor: Tensor) -> list[Callable[..., object]]:
    """The hooks that `register_hook` and `register_post_accumulate_grad_hook` have put on the tensor."""
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for table in tables for hook in (table or {}).values()]


def memory_of(tensor: Tensor) -> int:
    """Identifies the memory that tensors share, also on the meta device, where there is none and addresses are 0."""
    return tensor.untyped_storage()._cdata


def is_seen_by_a_mode() -> bool:
    """Whether some `TorchDispatchMode` sees the operations that run, such as that of selective recomputation."""
    return _get_current_dispatch_mode() is not None


def first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a hook that runs after each step before all others that were registered."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    return handle


def dtensor(part: Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]) -> Tensor:
    """This rank's part, wherever it lies, as a DTensor of the whole `shape`.

    The public `from_local` moves a part that was offloaded to the mesh's device, and takes ten times as long.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), part.dtype))
    return DTensor(part, spec, requires_grad=False)


@contextmanager
def replace_orthogonalisation(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """While it is open, `torch.optim.Muon` orthogonalises each matrix by another function.

    Args:
        replacement: is called with torch's function and its arguments, of which the first is the matrix.
    """
    from torch.optim import _muon

    plain = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = partial(replacement, plain)
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = plain
