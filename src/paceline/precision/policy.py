"""Precision as a row of a table: the dtype of autocast and whether the loss is scaled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.world.forward import original_forward, override_forward, restore_forward
from paceline.world.tree import map_tensors

_NAME = "precision"


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

    The module stays the same object with the same parameter names, so that nothing else needs to know.
    """
    if precision.dtype is None or original_forward(model, _NAME) is not None:
        return

    def forward(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with autocast(precision, device):
            output = original(*args, **kwargs)
        return to_float32(output)

    override_forward(model, _NAME, forward)


def unwrap_forward(model: nn.Module) -> None:
    """Puts back the forward that `wrap_forward` replaced; one that something was put around since stays."""
    restore_forward(model, _NAME)
