"""Precision as a row of a table: the dtype of autocast and whether the loss is scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.world.tree import map_tensors


@dataclass(frozen=True)
class Precision:
    """One row.

    Attributes:
        name: as it is written in a plan.
        dtype: dtype of autocast regions; None computes in the model's own.
        scales: whether gradients are kept in range by a dynamic loss scale.
    """

    name: str
    dtype: torch.dtype | None = None
    scales: bool = False


TABLE = {
    row.name: row
    for row in (
        Precision("no"),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16, scales=True),
    )
}


def autocast(
    precision: Precision, device: torch.device, *, enabled: bool = True, cache_enabled: bool | None = None
) -> AbstractContextManager[Any]:
    """The context in which a forward pass computes; one that does nothing for "no"."""
    if precision.dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype, enabled=enabled, cache_enabled=cache_enabled)


def to_float32(tree: Any) -> Any:
    """Half-precision floats of a nested structure as float32, so that a loss outside autocast is computed in full."""
    return map_tensors(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, tree)


def wrap_forward(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Makes `model(...)` compute under autocast and hand out float32; `unwrap_forward` takes it back.

    The module stays the same object with the same parameter names, so that nothing else needs to know. Both
    functions are bound methods: `copy.deepcopy(model)` (an average of weights, say) then computes with its own weights.
    """
    if precision.dtype is None or hasattr(model, "_paceline_forward"):
        return
    original = model.forward

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast(precision, device):
            output = self._paceline_forward(*args, **kwargs)  # type: ignore[operator]
        return to_float32(output)

    # A bound method hides its first parameter, so `self` must stand before those of the bound original.
    told = signature(original)
    first = Parameter("self", Parameter.POSITIONAL_ONLY)
    forward.__signature__ = told.replace(parameters=[first, *told.parameters.values()])  # type: ignore[attr-defined]
    model._paceline_forward = original  # type: ignore[assignment]
    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def unwrap_forward(model: nn.Module) -> None:
    """Puts back the forward that `wrap_forward` replaced; one that something was put around since stays."""
    original = model.__dict__.get("_paceline_forward")
    if original is None or getattr(model.forward, "__wrapped__", None) != original:
        return
    del model._paceline_forward, model.forward
    if original != model.forward:  # the user had replaced it before
        model.forward = original
