"""Optimizers that keep their states in 8 bits or fewer: those of torchao and bitsandbytes.

A state is stored as codes, with one scale for each block of consecutive values. A plan that divides states or parameters lets
each parameter be stepped whole by one rank (`parallel.data.division`), so that blocks are the same at any number of processes.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

from math import inf
from typing import Any

from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.base.parts import torchao_problem
from paceline.plan.plan import Decision


def adamw8bit(
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Returns torchao's `AdamW8bit`, which keeps about 2 bytes of states a parameter in place of 8.

    Args:
        params: as of any optimizer of torch: parameters, pairs of names and parameters, or groups.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.

    Shape:
        States of parameters with fewer than 4096 values, or no multiple of 256, have the dtype of the parameter.

    Raises:
        PrepareError: `torchao-missing`.
    """
    problem = torchao_problem("8-bit states", "low-bit", "the optimizer adamw8bit was asked for")
    if problem is not None:
        raise PrepareError.of([problem])
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return optimizer


def decisions_about(optimizer: Optimizer) -> list[Decision]:
    """Says what of the numbers of an optimizer with low-bit states depends on the number of processes."""
    if not _has_low_bit_states(optimizer):
        return []
    reason = (
        "each block of states lies in one parameter, which is stepped whole; n processes add gradients in another order than "
        "one, and a state that is rounded to another code enlarges that rounding (below 1 % of a step)"
    )
    return [Decision(f"optimizer.{type(optimizer).__name__}.numbers", "equal up to rounding", "derived", reason=reason)]


def _has_low_bit_states(optimizer: Optimizer) -> bool:
    # By the names of modules: both libraries are imported only by those who use them.
    libraries = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if "torchao" in libraries:
        return float(getattr(optimizer, "block_size", inf)) < inf
    if "bitsandbytes" in libraries:
        return getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32
    return False
