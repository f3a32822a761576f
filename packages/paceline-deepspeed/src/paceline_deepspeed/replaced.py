"""Parameters that a script took from its model before `initialize` replaced them by divided ones, at stage 3 of ZeRO.

DeepSpeed divides a parameter in place, so that such a script goes on with the same object. Here the object of before stays as
it was, and the functions that take a parameter look up here which one the model has now.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_CURRENT = WeakTensorKeyDictionary()  # a parameter of before -> a weak reference to the one of now


def record(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Records which parameters of a model have been replaced; both arguments are by the parameters' names."""
    for name, parameter in before.items():
        current_parameter = after.get(name)
        if current_parameter is not None and current_parameter is not parameter:
            _CURRENT[parameter] = weakref.ref(current_parameter)


def current(parameter: Tensor) -> Tensor:
    """Returns the parameter that the model has now in place of this one; the same one where it was not replaced."""
    reference: weakref.ref[Tensor] | None = _CURRENT.get(parameter)
    if reference is None:
        return parameter
    current_parameter = reference()
    if current_parameter is None:  # the engine is gone
        return parameter
    return current_parameter
