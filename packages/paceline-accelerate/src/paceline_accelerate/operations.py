"""The part of `accelerate.utils.operations` that communicates: functions for code that has no accelerator.

With ACCELERATE_DEBUG_MODE (`PartialState().debug`) each of them compares shapes first; if they differ, all ranks raise
`DistributedOperationException`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Literal, cast

import torch

from paceline.base.parts import require
from paceline.world import tree as trees
from paceline.world.sharded import is_sharded
from paceline_accelerate.errors import CompatValueError, DistributedOperationException
from paceline_accelerate.nested import TENSOR_TYPE_TO_INT, get_shape, other_type
from paceline_accelerate.state import PartialState


class CannotPadNestedTensorWarning(UserWarning):
    """Warns that a nested tensor is not padded, because its rows have different lengths."""


def _alone() -> bool:
    return bool(PartialState().num_processes == 1)


# -- ACCELERATE_DEBUG_MODE -----------------------------------------------------------------------------------


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an operation so that in debug mode all ranks compare the shapes of `tensor` first.

    Raises:
        DistributedOperationException: `collective-mismatch`, on all ranks.
    """

    @wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        if _is_compared():
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            _compare(function.__name__, get_shape(tensor))
        return function(*args, **kwargs)

    return verified


def _is_compared() -> bool:
    """Whether the ranks compare what they bring to an operation."""
    state = PartialState()
    return bool(state.debug and state.num_processes > 1)


def _compare(operation: str, shapes: object) -> None:
    """Raises `DistributedOperationException` on all ranks if they bring different shapes to an operation. Ranks: all."""
    shapes_by_rank = PartialState().collectives.gather_object(shapes)
    if any(other != shapes_by_rank[0] for other in shapes_by_rank):
        lines = [f"  - Process {rank}: {other}" for rank, other in enumerate(shapes_by_rank)]
        raise DistributedOperationException(
            "the ranks bring tensors of other shapes to one operation.\n\n"
            f"Operation: `accelerate.utils.operations.{operation}`\nInput shapes:\n" + "\n".join(lines),
            why="ACCELERATE_DEBUG_MODE compares them before each operation",
            fix="make them equal, for example by `pad_across_processes`",
        )


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an operation that calls others, so that their errors name it too."""

    @wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            if function.__module__ == __name__:
                name = f"accelerate.utils.operations.{function.__name__}"
            raise DistributedOperationException(
                f"an operation inside of `{name}` failed.", why=str(error), fix="see the error above"
            ) from error

    return chained


def _only_tensors(operation: Callable[..., Any], data: object) -> None:
    """Raises an error if the data has a leaf that is no tensor."""
    for leaf in trees.leaves(data):
        if not isinstance(leaf, torch.Tensor):
            raise other_type(operation, leaf)


# -- tensors -------------------------------------------------------------------------------------------------


@verify_operation
def gather(tensor: object) -> Any:
    """Concatenates the tensors of all processes along dim 0; with one process they stay as they are. Ranks: all."""
    if _alone():
        return tensor
    _only_tensors(gather, tensor)
    return PartialState().collectives.gather(tensor)


@verify_operation
def broadcast(tensor: object, from_process: int = 0) -> Any:
    """Copies the tensors of one process into the tensors of the others, in place. Ranks: all."""
    if _alone():
        return tensor
    _only_tensors(broadcast, tensor)
    received = PartialState().collectives.broadcast(tensor, from_process)
    with torch.no_grad():
        for target, value in zip(trees.tensors(tensor), trees.tensors(received), strict=True):
            target.copy_(value)
    return tensor


@verify_operation
def reduce(tensor: object, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduces tensors over processes; with one process the result is a copy. Ranks: all.

    Through "mean" and "sum" autograd computes the gradient of this process's part only.

    Args:
        tensor: a tensor, or nested containers of tensors.
        reduction: "mean", "sum" or "max".
        scale: is ignored, as accelerate does on all devices but XLA's.

    Raises:
        CompatTypeError, CompatValueError: `compat-argument`.
    """
    _only_tensors(reduce, tensor)
    if _alone():
        # A copy, because scripts change the result in place.
        return trees.map_tensors(torch.Tensor.clone, tensor)
    collectives = PartialState().collectives
    if reduction == "max":
        # Each tensor gets a first dim of 1, so that gathering stacks the ranks along it: [ranks, *shape].
        rows = trees.map_tensors(lambda leaf: leaf.detach().unsqueeze(0), tensor)
        stacked = collectives.gather(rows)
        return trees.map_tensors(lambda leaf: leaf.amax(0), stacked)
    word = reduction
    if reduction == "none":
        word = "sum"  # as under accelerate
    if word not in ("sum", "mean"):
        raise CompatValueError(
            "compat-argument",
            f"there is no reduction called {reduction!r}.",
            why="accelerate would sum without a word",
            fix='use "sum", "mean" or "max"',
        )
    totals = collectives.reduce(tensor, cast(Literal["sum", "mean"], word))
    divisor = 1
    if word == "mean":
        divisor = collectives.size
    results = []
    for part, total in zip(trees.tensors(tensor), trees.tensors(totals), strict=True):
        results.append(_with_gradient_of(part, total, divisor))
    return trees.unflatten(tensor, results)


def _with_gradient_of(part: torch.Tensor, total: torch.Tensor, divisor: int) -> torch.Tensor:
    """Returns the values of `total` with the gradient of `part / divisor`.

    A script may call `backward` on a loss that it has reduced.
    """
    if not part.requires_grad:
        return total
    result = part / divisor
    # The result keeps the graph of the division; only its values are replaced.
    with torch.no_grad():
        result.copy_(total)
    return result


@chained_operation
def pad_across_processes(tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pads tensors to the length that the longest has on any process; nested tensors are not padded. Ranks: all.

    Raises:
        CompatTypeError: `compat-argument`.
        DistributedOperationException: if the numbers of dims differ, in debug mode.
    """
    _only_tensors(pad_across_processes, tensor)
    if any(leaf.is_nested for leaf in trees.tensors(tensor)):
        message = "Nested tensors cannot be padded: their rows have lengths of their own. They stay as they are."
        warnings.warn(message, CannotPadNestedTensorWarning, stacklevel=3)
        return tensor
    if _is_compared():
        # Lengths may differ before padding, and the number of dims may not.
        _compare("pad_across_processes", trees.map_tensors(lambda leaf: f"{leaf.ndim} dims", tensor))
    return PartialState().collectives.pad_across(tensor, dim, pad_index, pad_first)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Tells all processes the shape and dtype of a tensor that one of them has.

    Ranks: all; those that do not have the tensor pass None.

    Returns:
        The shape as a column, and the dtype's number in `TENSOR_TYPE_TO_INT`.
    """
    spec = None
    if tensor is not None:
        spec = (list(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])
    shape, dtype = _first_given(PartialState().collectives.gather_object(spec))
    return torch.tensor(shape, dtype=torch.int32).unsqueeze(1), dtype


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copies a tensor that one process has to the devices of all. Ranks: all; those that do not have it pass None."""
    state = PartialState()
    # Over the host, because this rank may have no accelerator of the number that the sender's tensor names.
    on_host = None
    if tensor is not None:
        on_host = tensor.detach().cpu()
    received: torch.Tensor = _first_given(state.collectives.gather_object(on_host))
    return received.to(state.device)


def _first_given(values: list[Any]) -> Any:
    """Returns the value of the first rank that has one."""
    given_values = [value for value in values if value is not None]
    return given_values[0]


# -- objects -------------------------------------------------------------------------------------------------


def gather_object(object: object) -> Any:
    """Joins the lists of all processes into one; with one process it returns the object itself. Ranks: all."""
    if _alone():
        return object
    entries: list[Any] = []
    for entries_of_rank in PartialState().collectives.gather_object(object):
        entries.extend(entries_of_rank)
    return entries


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copies the objects of one process into the lists of all, in place. Ranks: all."""
    if not _alone():
        received = PartialState().collectives.broadcast_object(list(object_list), from_process)
        for place, value in enumerate(received):
            object_list[place] = value
    return object_list


def wait_for_everyone() -> None:
    """Returns when every process has called it. Ranks: all."""
    PartialState().wait_for_everyone()


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Gathers sharded parameters for a block; it does nothing for parameters that are not sharded. Ranks: all."""
    parameters = [params]
    if not isinstance(params, torch.Tensor):
        parameters = list(params)
    if not enabled or not any(is_sharded(parameter) for parameter in parameters):
        return nullcontext()
    require("deepspeed", "what gathers sharded parameters is", "GatheredParameters(...)")
    from paceline_deepspeed.zero import GatheredParameters as gathered

    return gathered(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled)
