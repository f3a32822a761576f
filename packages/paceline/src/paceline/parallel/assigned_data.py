"""Lets an optimizer of the user's own write `parameter.data = value` where the parameter is a DTensor.

torch changes nothing there, and says nothing: a DTensor keeps its values in another tensor. So SAM would not go back to where
it came from, and an optimizer that steps by `p.data = p.data - lr * p.grad` would not train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def copy_assigned_data(adapter: OptimizerAdapter) -> None:
    """Makes the methods of an optimizer copy what they assign to `.data` of a DTensor; torch's own assign nothing."""
    if any(map(is_sharded, parameters_of(adapter.optimizer))):
        adapter.surround(lambda _: _CopyAssignedData())


class _CopyAssignedData(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and is_sharded(args[0]):
            return args[0].detach().copy_(args[1])
        return func(*args, **(kwargs or {}))
