"""What tensors and operations keep in private: views, hooks, memory, versions."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode


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
    return list((table.others if isinstance(table, _OneHook) else table or {}).values())


class _OneHook(dict[int, Callable[[Tensor], Any]]):
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
    if isinstance(before, _OneHook):
        others = before.others
    elif before:
        others.update(before)
    table = _OneHook(hook, others)
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
    table: Any = _OneHook(hook, others)
    tensor._backward_hooks = table

    def give_back() -> None:
        if tensor._backward_hooks is table:
            tensor._backward_hooks = OrderedDict(others)

    return others, give_back


def put_hooks_by(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keeps autograd from calling what `register_post_accumulate_grad_hook` has got, for several backward passes.

    Tensors whose hooks were taken over already are left out.

    Returns:
        A function that gives the hooks back and calls those of tensors that got a gradient, once each.
    """
    reached: set[Tensor] = set()
    put_by: list[tuple[Tensor, dict[int, Callable[[Tensor], None]], Callable[[], None]]] = []
    for tensor in tensors:
        hooks = tensor._post_accumulate_grad_hooks
        if hooks and not isinstance(hooks, _OneHook):
            put_by.append((tensor, *take_over_hooks(tensor, reached.add)))

    def give_back() -> None:
        for tensor, hooks, end in put_by:
            end()
            if tensor in reached:
                for hook in list(hooks.values()):
                    hook(tensor)
        put_by.clear()

    return give_back


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


@dataclass(frozen=True)
class Reduction:
    """A node that makes one number of a tensor, or numbers that each depend on several samples.

    Attributes:
        is_mean: whether it divides by `count`; else it adds up.
        sizes: the shape of what it reduces.
        count: what it divides by; a tensor where only the device knows it.
        is_of_columns: whether it adds up the samples, and keeps another dimension.
        is_joint: whether it is no sum over samples at all, as a norm, a maximum or a softmax over them.
    """

    is_mean: bool
    sizes: tuple[int, ...]
    count: float | Tensor
    is_of_columns: bool = False
    is_joint: bool = False


def reduction_of(node: Any, rows: int = 0) -> Reduction | None:
    """What a node reduces to one number, or over its samples; None for another node. Nothing is read from a device.

    Args:
        node: a `grad_fn`, whose backward pass has not run yet.
        rows: the number of samples, by which a dimension of them is known; 0 looks for single numbers only.
    """
    name = node.name()
    if name.startswith(("MeanBackward", "SumBackward")):
        sizes = tuple(node._saved_self_sym_sizes)
        is_mean = name.startswith("Mean")
        dims = _dims_of(node, len(sizes))
        if len(dims) == len(sizes):
            return Reduction(is_mean, sizes, math.prod(sizes))
        if dims == {0} and _are_samples(sizes, rows):
            return Reduction(is_mean, sizes, sizes[0], is_of_columns=True)
        return None
    if name.startswith(_PRODUCTS + _SCATTERED):
        length = _sum_of_product(node) if name.startswith(_PRODUCTS) else _scattered_rows(node)
        adds_samples = rows > 1 and length == rows
        return Reduction(False, (rows,), rows, is_of_columns=True) if adds_samples else None
    if name.startswith(_JOINT):
        sizes = _shape_of_operand(node, 0) or _shape_of_operand(node, 1)
        dims = _dims_of(node, len(sizes))
        is_joint = _are_samples(sizes, rows) or (bool(sizes) and sizes[0] == rows > 1 and len(dims) == len(sizes))
        return Reduction(False, sizes, 1, is_joint=True) if is_joint and 0 in dims else None
    reduction = getattr(node, "_saved_reduction", None)
    # What a gradient of a loss was computed by has its `reduction`, too, but gives a tensor.
    if reduction not in (_MEAN, _SUM) or "BackwardBackward" in name:
        return None
    target = _saved(node, "target")
    if target is None:
        return None
    sizes = tuple(target.shape)
    count: float | Tensor = math.prod(sizes)
    if name.startswith("NllLoss"):
        # `cross_entropy` leaves out targets with `ignore_index`, and weighs targets by their class.
        total_weight = _saved(node, "total_weight")
        if total_weight is None:
            return None
        count = total_weight
    return Reduction(reduction == _MEAN, sizes, count)


def _are_samples(sizes: tuple[int, ...], rows: int) -> bool:
    """Whether the first dimension is that of the samples; with three of them it may be one of positions."""
    return 0 < len(sizes) <= 2 and sizes[0] == rows > 1


def _dims_of(node: Any, ndim: int) -> set[int]:
    """The dimensions that an operation of this node reduces: all, if it has no `dim`."""
    dims = getattr(node, "_saved_dim", None)
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or not ndim:
        return set(range(ndim))
    # Negative numbers are kept without their sign.
    return {(dim - 2**64 if dim >= 2**63 else dim) % ndim for dim in dims}


def _shape_of_operand(node: Any, operand: int) -> tuple[int, ...]:
    """The shape of an operand that has a gradient; empty for another one."""
    operands = node.next_functions
    below, number = operands[operand] if operand < len(operands) else (None, 0)
    return () if below is None else tuple(below._input_metadata[number].shape)


def _sum_of_product(node: Any) -> int | None:
    """The length of the dimension over which a product of matrices adds up, if neither dimension of the result is as long."""
    result = tuple(node._input_metadata[0].shape)
    left, right = _shape_of_operand(node, 0), _shape_of_operand(node, 1)
    if len(result) == 3 and result[0] != 1:
        return None  # many matrices; `einsum` makes one of them of two matrices
    if left:
        length = left[-1]
    elif right:
        length = right[-2] if len(right) > 1 else right[0]
    else:
        return None
    return None if length in result else length


def _scattered_rows(node: Any) -> int | None:
    """The number of rows that are added to some of the rows of the result, if it has another number of them."""
    result, source = tuple(node._input_metadata[0].shape), _shape_of_operand(node, 1)
    return source[0] if source and result and source[0] != result[0] else None


def _saved(node: Any, name: str) -> Any:
    """Returns what a node has saved; None where a hook would have to bring it back.

    The hook of recomputed layers runs them again, and those of copies on the host take their copy away. Both may be called
    once, in the backward pass.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def divisor_of(node: Any, operand: int) -> float | Tensor | None:
    """The number by which a node divides one of its operands, or by whose inverse it multiplies it; None for another node.

    It is a tensor where only the device knows it, which is not waited for.

    Args:
        node: a `grad_fn`, whose backward pass has not run yet.
        operand: 0 for the first one, 1 for the second one.
    """
    name = node.name()
    if not name.startswith("MulBackward") and not (name.startswith("DivBackward") and operand == 0):
        return None
    other = _saved(node, "self" if operand else "other")
    if isinstance(other, Tensor):
        if other.numel() != 1:
            return None
        other = other.detach()
    elif other is None:
        return None
    if name.startswith("DivBackward"):
        return other if isinstance(other, Tensor) else float(other)
    if isinstance(other, Tensor):
        return 1 / other
    return 1 / float(other) if other else None


_SCATTERED = ("IndexAddBackward", "ScatterAddBackward")
_PRODUCTS = ("MmBackward", "BmmBackward", "MvBackward", "DotBackward")
# Operations whose result for several samples is no sum of numbers, one for each of them.
_JOINT = (
    *("LinalgVectorNormBackward", "NormBackward", "DistBackward", "StdBackward", "VarBackward", "StdMeanBackward"),
    *("VarMeanBackward", "MaxBackward", "MinBackward", "AmaxBackward", "AminBackward", "MedianBackward", "NanmedianBackward"),
    *("KthvalueBackward", "LogsumexpBackward", "SoftmaxBackward", "LogSoftmaxBackward", "LogcumsumexpBackward"),
    *("TopkBackward", "SortBackward", "CumsumBackward", "CumprodBackward", "ProdBackward", "LinalgSvdBackward"),
)
# torch's numbers for `reduction`
_MEAN = 1
_SUM = 2
