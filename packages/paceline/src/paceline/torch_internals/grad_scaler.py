"""The private side of `torch.amp.GradScaler`: it unscales tensors of any layout, and its flags of overflow."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def unscale(scaler: GradScaler, holders: Sequence[Tensor]) -> list[Tensor]:
    """Divides the gradients of these tensors by the scale.

    Args:
        scaler: has scaled a loss already.
        holders: plain tensors with gradients, all on one side: on the host, or on accelerators.

    Returns:
        For each device a flag, 1.0 if a gradient on it was not finite. Shape: [] or [1].
    """
    scale, _ = scaler._check_scale_growth_tracker("unscale_")
    # The reciprocal of a large scale is rounded to 0 in half precision, so it is taken in double precision, as torch does.
    inverse = scale.double().reciprocal().float()
    overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
    # Gradients of offloaded parameters are on the host. torch would copy these two numbers there without a wait, and its kernel
    # would read them too early.
    if holders and all(holder.is_cpu for holder in holders):
        inverse = inverse.cpu()
        overflow = overflow.cpu()
    # torch's method reads only the attribute `param_groups` of an optimizer. Its own `unscale_` refuses DTensors beside plain
    # tensors, or of two meshes.
    parts: Any = SimpleNamespace(param_groups=[{"params": list(holders)}])
    flags: dict[Any, Tensor] = scaler._unscale_grads_(parts, inverse, overflow, False)
    return list(flags.values())


def give_flag(scaler: GradScaler, optimizer: Optimizer, flag: Tensor) -> None:
    """Says that an optimizer is unscaled, and whether one of its gradients overflowed: then the scaler does not step it.

    Shape: flag [].
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.UNSCALED
    state["found_inf_per_device"] = {flag.device: flag}


def check_before_step(optimizer: Optimizer) -> None:
    """Makes scalers check for overflows before each step, also if the optimizer has a fused step, which checks them itself.

    A fused step on the host gets its copy of a flag of an accelerator without a wait, and would read it too early.
    """
    optimizer._step_supports_amp_scaling = False
