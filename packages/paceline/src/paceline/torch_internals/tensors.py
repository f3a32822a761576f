"""What tensors and operations keep in private: views, hooks, memory, versions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._base is not None


def has_gradient_hook(tensor: Tensor, name: str) -> bool:
    """Whether `register_hook` has got a function of this name in full (`__qualname__`) on the tensor."""
    return any(getattr(hook, "__qualname__", None) == name for hook in hooks_before(tensor))


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Registers a hook on the tensor's gradient, of which pickling the tensor says nothing."""
    vars(hook)["__torch_unserializable__"] = True
    tensor.register_hook(hook)


def gradient_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """The functions of `register_hook` and `register_post_accumulate_grad_hook` that stand on the tensor."""
    return hooks_before(tensor) + _hooks_of(tensor._post_accumulate_grad_hooks)


def hooks_before(tensor: Tensor) -> list[Callable[..., Any]]:
    """The functions of `register_hook` that stand on the tensor, also those that were taken over."""
    return _hooks_of(tensor._backward_hooks)


def has_hooks_after(tensor: Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` has got a function on the tensor."""
    return bool(tensor._post_accumulate_grad_hooks)


def _hooks_of(table: Any) -> list[Callable[..., Any]]:
    return list((table.others if isinstance(table, OneHook) else table or {}).values())


class OneHook(dict[int, Callable[[Tensor], Any]]):
    """A table of a tensor's hooks: autograd sees one of them, the others are put by."""

    def __init__(self, hook: Callable[[Tensor], Any], others: dict[int, Callable[[Tensor], None]]) -> None:
        super().__init__({-1: hook})
        self.others = others

    # These are the three that the methods which register hooks, and their handles, use. Autograd reads the dict itself.
    def __setitem__(self, number: int, hook: Callable[[Tensor], None]) -> None:
        self.others[number] = hook

    def __delitem__(self, number: int) -> None:
        del self.others[number]

    def __contains__(self, number: object) -> bool:
        return number in self.others


def take_over_hooks(
    tensor: Tensor, hook: Callable[[Tensor], None]
) -> tuple[dict[int, Callable[[Tensor], None]], Callable[[], None]]:
    """Makes `hook` the only function that autograd calls after it has accumulated into the tensor's gradient.

    Returns:
        The other functions that `register_post_accumulate_grad_hook` has got, and will get, for the caller to call when it
        is time; and a function that ends all this.
    """
    others: dict[int, Callable[[Tensor], None]] = {}
    before = tensor._post_accumulate_grad_hooks
    if isinstance(before, OneHook):
        others = before.others
    elif before:
        others.update(before)
    table = OneHook(hook, others)
    tensor._post_accumulate_grad_hooks = table

    def give_back() -> None:
        if tensor._post_accumulate_grad_hooks is table:
            tensor._post_accumulate_grad_hooks = OrderedDict(others)

    return others, give_back


def has_users_gradient_hooks(tensor: Tensor) -> bool:
    """Whether autograd calls a function of the script's with the tensor's gradient, before it accumulates."""
    # A model has thousands of parameters, which are looked at in each step, and hardly one with a hook.
    hooks = tensor._backward_hooks
    if not hooks:
        return False
    return any(map(is_users_hook, hooks.values()))


def is_users_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the script's; ours, of any run of this process, are told apart by the module that defines them."""
    return not str(getattr(hook, "__module__", "")).startswith("paceline.")


def take_over_gradient_hooks(
    tensor: Tensor, hook: Callable[[Tensor], Tensor]
) -> tuple[dict[int, Callable[..., Any]], Callable[[], None]]:
    """Makes `hook` the only function that autograd calls with the tensor's gradient, before it accumulates.

    Returns:
        The functions that `register_hook` has got, and will get, for the caller to call when it is time; and a function that
        ends all this.
    """
    others: dict[int, Callable[..., Any]] = tensor._backward_hooks or {}
    table: Any = OneHook(hook, others)
    tensor._backward_hooks = table

    def give_back() -> None:
        if tensor._backward_hooks is table:
            tensor._backward_hooks = OrderedDict(others)

    return others, give_back


def without_torch_function() -> AbstractContextManager[Any]:
    """While it is open, functions of torch see tensors as they are, whatever a mode or a class of tensors shows."""
    return torch._C.DisableTorchFunction()


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether no other tensor sees the memory in which this one lies."""
    storage = tensor.untyped_storage()
    # The tensor itself and the object `storage` count.
    return torch._C._storage_Use_Count(storage._cdata) <= 2


def times_written(tensor: Tensor) -> int:
    """How often operations have written to the tensor, or to one that shares its memory as a view, in place."""
    return tensor._version


def multiply_in_place(tensors: list[Tensor], factor: float) -> None:
    """Multiplies all tensors, of which there is at least one, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def memory_of(tensor: Tensor) -> int:
    """Identifies the memory that tensors share, also on the meta device, where there is none and addresses are 0."""
    return tensor.untyped_storage()._cdata


def dtensor(part: Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]) -> Tensor:
    """This rank's part, wherever it lies, as a DTensor of the whole `shape`.

    The public `from_local` moves a part that was offloaded to the mesh's device, and takes ten times as long.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), part.dtype))
    return DTensor(part, spec, requires_grad=False)
