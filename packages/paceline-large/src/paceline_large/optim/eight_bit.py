"""`adamw8bit`: AdamW with states of 8 bits, by torchao.

A state is stored as codes, with one scale for each block of consecutive values. A plan that divides states or parameters lets
each parameter be stepped whole by one rank (`parallel.data.division`), so that blocks are the same at any number of processes.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline_large.torchao_release import torchao_problem


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
