"""Lets an optimizer of the user's own write `parameter.data = value` where the parameter is a DTensor.

torch changes nothing there, and says nothing: a DTensor keeps its values in another tensor. So SAM would not go back to where
it came from, and an optimizer that steps by `p.data = p.data - lr * p.grad` would not train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def copy_assigned_data(optimizer: Optimizer) -> None:
    """Makes the methods of an optimizer copy what they assign to `.data` of a DTensor; torch's own assign nothing."""
    if not any(map(is_sharded, parameters_of(optimizer))):
        return
    for name in dir(type(optimizer)):
        if name.startswith("_"):
            continue
        method = getattr(optimizer, name)
        if isinstance(method, MethodType) and not method.__module__.startswith("torch."):
            setattr(optimizer, name, _copying(method))


def _copying(method: MethodType) -> Callable[..., object]:
    @wraps(method)  # copies the mark by which torch's schedulers recognise a step that they count
    def call(*args: object, **kwargs: object) -> object:
        with _CopyAssignedData():
            return method(*args, **kwargs)

    return call


class _CopyAssignedData(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and is_sharded(args[0]):
            return args[0].detach().copy_(args[1])
        return func(*args, **(kwargs or {}))
