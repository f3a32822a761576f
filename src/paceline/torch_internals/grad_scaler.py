"""The private side of `torch.amp.GradScaler`: its flags of overflow, and what it has unscaled since its last step."""

from __future__ import annotations

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def overflow_flags(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns for each device whether a gradient of the optimizer overflowed; empty if it had no gradients.

    What is written to a flag decides whether the scaler steps.

    Shape: each flag has one element, 1.0 for an overflow.
    """
    flags: dict[str, Tensor] = scaler._found_inf_per_device(optimizer)
    return flags


def set_overflow_flag(scaler: GradScaler, optimizer: Optimizer, flag: Tensor) -> None:
    """Gives an optimizer that was unscaled without gradients the flag of an overflow elsewhere."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {flag.device: flag}


def check_before_step(optimizer: Optimizer) -> None:
    """Makes scalers check for overflows before each step, also if the optimizer has a fused step, which checks them itself.

    A fused step on the host gets its copy of a flag of an accelerator without a wait, and would read it too early.
    """
    optimizer._step_supports_amp_scaling = False


def forget(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Lets the scaler forget that it has unscaled this optimizer, as a step would."""
    scaler._per_optimizer_states.pop(id(optimizer), None)
