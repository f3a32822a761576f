"""`override_forward`: another `forward` on one module, which stays the same object with the same names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any

from torch import nn


def override_forward(module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    """Puts `replacement(module, original, *args, **kwargs)` in the place of the module's own forward, on the instance.

    Its signature stays that of the original. `copy.deepcopy(module)` computes with its own weights: both functions are bound
    methods, which a copy binds to the copy.

    Args:
        module: may have been overridden before; what comes later stands outside.
        name: of what overrides, for `restore_forward` and `original_forward`.
    """
    original = module.forward
    slot = _newest_slot(module, name)
    if slot in vars(module):  # the same was done before: the model was prepared once more
        slot += "_"

    # A report of a waiting rank names this function.
    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, getattr(self, slot), *args, **kwargs)

    # A bound method hides its first parameter, so `self` must stand before those of the bound original.
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    others = signature(original).parameters.values()
    forward.__signature__ = signature(original).replace(parameters=[own, *others])  # type: ignore[attr-defined]
    setattr(module, slot, original)
    module.forward = MethodType(forward, module)


def rebind_forward(module: nn.Module, function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Puts another function in the place of the forward that overrides have kept, where the module has become another class."""
    for slot, kept in list(vars(module).items()):
        if isinstance(kept, MethodType) and kept.__func__ is function:
            setattr(module, slot, MethodType(other, module))


def original_forward(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """What the last `override_forward` of this name has replaced; None where it was not called."""
    original: Callable[..., Any] | None = vars(module).get(_newest_slot(module, name))
    return original


def restore_forward(module: nn.Module, name: str) -> None:
    """Puts back what the last `override_forward` of this name has replaced; if something was put around it since, it stays."""
    original = original_forward(module, name)
    if original is None or getattr(module.forward, "__wrapped__", None) != original:
        return
    delattr(module, _newest_slot(module, name))
    del module.forward
    if original != module.forward:  # somebody had replaced it before us
        module.forward = original


def _newest_slot(module: nn.Module, name: str) -> str:
    """Returns the attribute for the original of the last override of this name; the module lacks it if there was none."""
    slot = f"_forward_before_{name}"
    while f"{slot}_" in vars(module):
        slot += "_"
    return slot


class OwnHook:
    """A hook of ours on a model of the script. Copies and files of the model have a function that does nothing in its place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # who loads the file may not have Paceline
