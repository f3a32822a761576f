"""The private side of torch's dispatcher: modes that see every operation, and the operations that they see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

Operation = Any  # a `torch._ops.OpOverload`, for which torch has no public name


def without_modes() -> AbstractContextManager[Any]:
    """While it is open, no mode sees what runs."""
    return _disable_current_modes()


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether kernels compute on the parameter itself, as on those without values that stand in for such a one."""
    return type(parameter) is nn.Parameter or hasattr(parameter, "fake_mode")


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a form alone, on the meta device or under a `FakeTensorMode`."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")


def aten(name: str) -> Operation:
    """An operator of torch's own library, such as "mm"; those that torch may rename begin with an underscore."""
    return getattr(torch.ops.aten, name)


def written_arguments(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to, which may be lists of tensors."""
    written: list[Any] = []
    for number, name in _written_places(operation):
        if number < len(args):
            written.append(args[number])
        elif name in kwargs:
            written.append(kwargs[name])
    return written


@cache
def _written_places(operation: Operation) -> list[tuple[int, str]]:
    """The number and the name of each argument that an operation writes to. torch makes new objects of its schema each time."""
    places: list[tuple[int, str]] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            places.append((number, argument.name))
    return places


def is_in_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_in_autograd_node() -> bool:
    """Whether autograd computes gradients on this thread, or calls a hook on them, and not what a pass ends with."""
    return torch._C._current_autograd_node() is not None


def backward_pass() -> int:
    """Returns the number of the backward pass that runs on this thread; later ones have larger numbers. -1 outside of all."""
    return torch._C._current_graph_task_id()


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward pass that runs adds to a leaf's `.grad`; `torch.autograd.grad` calls its hooks, and does not."""
    if not leaf.requires_grad:
        return True  # frozen meanwhile, which `torch.autograd.grad` refuses
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False


def is_in_function_backward() -> bool:
    """Whether the `backward` of a `torch.autograd.Function` runs, as around a pass that recomputes a reentrant checkpoint."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def after_backward_pass(callback: Callable[[], None]) -> None:
    """Calls `callback` once, at the end of the backward pass that runs; callbacks run in the order in which they came."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
