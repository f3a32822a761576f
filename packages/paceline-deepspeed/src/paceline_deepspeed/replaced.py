"""Parameters that stand for a divided one, at stage 3 of ZeRO: those of before `initialize`, and those of a forward pass.

DeepSpeed divides a parameter in place, so that a script goes on with the same object. Here the object of before stays as it
was, and after a forward pass a model may still have whole ones. Functions that take a parameter look up here which one it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.torch_internals.fsdp import shard_behind

_CURRENT = WeakTensorKeyDictionary()  # a parameter of before -> a weak reference to the one of now


def record(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Records which parameters of a model have been replaced; both arguments are by the parameters' names."""
    for name, parameter in before.items():
        current_parameter = after.get(name)
        if current_parameter is not None and current_parameter is not parameter:
            _CURRENT[parameter] = weakref.ref(current_parameter)


def current(parameter: Tensor) -> Tensor:
    """Returns the parameter that holds the values now, in place of this one; the same one where none replaces it."""
    reference: weakref.ref[Tensor] | None = _CURRENT.get(parameter)
    current_parameter = None if reference is None else reference()
    # There is none where the engine is gone.
    return shard_behind(parameter if current_parameter is None else current_parameter)
