"""`Precision`: in which dtype a forward pass computes, and whether the loss is scaled.

A precision is one file of this package with `PRECISION = Precision(...)`; the setting `mixed_precision` takes it by the file's
name. One that does more than choose a dtype subclasses `Precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.plan.plan import Plan
from paceline.world.forward import original_forward, override_forward, restore_forward
from paceline.world.tree import map_tensors

_NAME = "precision"
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes:
        name: as it is written in a plan; the name of its file.
        dtype: dtype of autocast regions; None computes in the model's own.
        scales: whether gradients are kept in range by a dynamic loss scale.
    """

    name: str
    dtype: torch.dtype | None = None
    scales: bool = False

    def under(self, options: Mapping[str, Any]) -> Precision:
        """Returns the precision as the plan's options of its name change it."""
        return self

    def settle(self, plan: Plan, accelerated: bool) -> Plan:
        """Returns the plan with what this precision decides by the device: whether it is an accelerator."""
        return plan

    def autocast(
        self, device: torch.device, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[object]:
        """The context in which a forward pass computes; one that does nothing where there is no dtype."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype, enabled=enabled, cache_enabled=cache_enabled)

    def wrap_forward(self, model: nn.Module, device: torch.device) -> None:
        """Makes `model(...)` compute under autocast and hand out float32; `unwrap_forward` takes it back.

        The module stays the same object with the same parameter names, so that nothing else needs to know.
        """
        if self.dtype is None or original_forward(model, _NAME) is not None:
            return

        def forward(module: nn.Module, original: Callable[..., object], *args: object, **kwargs: object) -> object:
            with self.autocast(device):
                output = original(*args, **kwargs)
            return to_float32(output)

        override_forward(model, _NAME, forward)


def to_float32(tree: Tree) -> Tree:
    """Half-precision floats of a nested structure as float32, so that a loss outside autocast is computed in full."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    return cast(Tree, map_tensors(widen, tree))


def unwrap_forward(model: nn.Module) -> None:
    """Puts back the forward that `wrap_forward` replaced; one that something was put around since stays."""
    restore_forward(model, _NAME)
