"""The private side of DTensor: its own tensor, and how a placement cuts one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement

Answers = tuple[Callable[..., bool], Callable[..., Any], Callable[..., None]]

# DTensor logs here, on each rank, that a gather over several axes would be faster with a mesh made differently.
REDISTRIBUTION_LOG = "torch.distributed.tensor._redistribute"

_kept_meshes: list[DeviceMesh] = []  # of the process from which this one was forked


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which shares its memory.

    The public `to_local` records a step of autograd where gradients are enabled.
    """
    return tensor._local_tensor


def forget_results() -> None:
    """Forgets on which meshes the results of operations were, so that they are on the mesh of their arguments.

    DTensor keeps the result's mesh for arguments that are equal. Meshes with the same ranks and names are equal, also where
    the groups of one were destroyed, and where its groups' names belong to other groups since.
    """
    if _has_results():
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _has_results() -> bool:
    """Returns whether DTensor keeps results of this thread."""
    return "torch.distributed.tensor" in sys.modules and any(torch._C._get_DTensor_sharding_propagator_cache_stats())


def _keep_meshes_of_parent() -> None:
    """Keeps the meshes of results with which this process was forked, as long as it lives.

    The last reference to a group may be in a result. A forked process has none of the threads of its parent's groups, and would
    wait for them for ever as it destroys one.
    """
    if not _has_results():
        return
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    # A list of all objects would write to each of them, and so copy the memory of the parent.
    _kept_meshes.extend(each for each in gc.get_referrers(DeviceMesh) if type(each) is DeviceMesh)
    if is_frozen:
        gc.freeze()


os.register_at_fork(after_in_child=_keep_meshes_of_parent)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a dim that tensor parallelism divides a second time, after FSDP: by another order of ranks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def answer(operation: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function run in the place of an operator of torch's, for arguments that are DTensors.

    Args:
        operation: such as `aten("normal_").default`.
        function: gets the operator, its arguments and its keyword arguments.

    Returns:
        What has run there before, with the same arguments.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers.get(operation, unanswered)
    handlers[operation] = function
    return before


def answer_mixtures(answers: Answers) -> None:
    """Lets a function run in the place of operators that compute with several values or write to one, on some arguments.

    torch asks for such a function before it refuses the mixture. Where it is not to run, operations go their way.

    Args:
        answers: whether the function runs; the function; and what gets the result, too, after an operation that has gone its
            way on all ranks. All get the operator, its arguments and its keyword arguments.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    functions = answers_to_mixtures(answers)
    taken = {operation: before for operation, before in handlers.items() if operation in functions}
    handlers.update(functions)
    for operation, before in taken.items():
        # Losses of divided logits take whole targets, while `loss_parallel` is on.
        is_loss = getattr(before, "__module__", None) == "torch.distributed.tensor.parallel.loss"
        handlers[operation] = before if is_loss else _answer_or_pass(before, answers)


# Those of open `mixtures_refused`, the innermost last: torch's table is one for the process, too.
_refusals: list[Callable[[str], Exception]] = []


@contextmanager
def mixtures_refused(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """While it is open, what `answer_mixtures` would answer is an error: ranks do not run the same operations.

    Args:
        refusal: gives the error for an operation, by its name.
    """
    _refusals.append(refusal)
    try:
        yield
    finally:
        _refusals.pop()


@cache
def answers_to_mixtures(answers: Answers) -> dict[Any, Callable[..., Any]]:
    """Returns torch's own operators that take several tensors or a number, or write to one, each with what runs in its place.

    torch makes the object of an operator when it is first asked for: 0.2 s for all 2,300, which a process that forks others
    can spend for all of them.
    """
    functions = {}
    for schema in torch._C._jit_get_all_schemas():
        # As "aten::lerp_.Scalar(Tensor(a!) self, Tensor end, Scalar weight) -> Tensor(a!)": reading the text takes a fifth of
        # the time of reading the objects.
        name, _, rest = str(schema).partition("(")
        arguments = rest.partition(" -> ")[0]
        is_computed = arguments.count("Tensor") > 1 or any(
            map(arguments.__contains__, ("Tensor[]", "Tensor?[]", "Scalar"))
        )
        if name.startswith("aten::") and (is_computed or "!" in arguments):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            operation = getattr(packet, schema.overload_name or "default")
            functions[operation] = _answer_or_pass(None, answers)
    return functions


def lost_view(tensor: DTensor) -> tuple[DTensor, Callable[[Tensor], Tensor]] | None:
    """What a view of a DTensor was taken of, and how, if it has memory of its own: what is written into it would be lost.

    torch gathers rows to take a slice of them, for example.

    Returns:
        The other DTensor, and a function that takes this view of another tensor with the same shape; None if the view looks
        at the memory of the other, or the tensor is no view.
    """
    base: Any = tensor._base
    if base is None or tensor._local_tensor.untyped_storage()._cdata == base._local_tensor.untyped_storage()._cdata:
        return None
    return base, tensor._view_func_unsafe


def _answer_or_pass(before: Callable[..., Any] | None, answers: Answers) -> Callable[..., Any]:
    is_answered, function, passed = answers

    def answer_or_pass(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if is_answered(operation, args, keywords):
            if _refusals:
                raise _refusals[-1](str(operation))
            return function(operation, args, keywords)
        result = (before or unanswered)(operation, args, keywords)
        if not _refusals:
            passed(operation, args, keywords, result)
        return result

    return answer_or_pass


def unanswered(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Runs an operator as torch does on its own, from inside of the function that runs in its place."""
    from torch.distributed.tensor import DTensor

    # torch has no other way to do so: it looks into the table first.
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    function = handlers.pop(operation)
    try:
        return operation(*args, **keywords)
    finally:
        handlers[operation] = function


def chunk(tensor: Tensor, chunks: int, index: int, dim: int = 0) -> Tensor:
    """One of the views that `torch.chunk` makes, without the others: thousands of ranks would each make thousands of views.

    Shape: as `tensor`, with ceil(rows / chunks) rows along `dim`; the last chunks may have fewer, or none.
    """
    rows = tensor.shape[dim]
    rows_of_chunk = -(-rows // chunks)
    start = min(index * rows_of_chunk, rows)
    stop = min(start + rows_of_chunk, rows)
    return tensor.narrow(dim, start, stop - start)


def shard_of(tensor: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """The part of a tensor that `Shard`, or its strided form, gives to one of `size` ranks; a view where that is possible.

    Shape: as `tensor`, shorter along `placement.dim`; the parts of the last ranks may be smaller than the others, or empty.
    """
    dim: int = placement.dim
    runs = getattr(placement, "split_factor", 1)
    if runs == 1:
        return chunk(tensor, size, rank, dim)
    return torch.cat([chunk(run, size, rank, dim) for run in tensor.chunk(runs, dim)], dim)


def compile_beside_parts() -> None:
    """Lets torch's compiler read a whole parameter whose gradient is divided: it would describe both alike, and fail.

    To what is compiled, such a parameter has no gradient.
    """
    from torch._subclasses import meta_utils
    from torch.distributed.tensor import DTensor

    plain = meta_utils.safe_grad

    def safe_grad(tensor: Any) -> Any:
        gradient = plain(tensor)
        return None if isinstance(gradient, DTensor) and not isinstance(tensor, DTensor) else gradient

    vars(meta_utils)["safe_grad"] = safe_grad
