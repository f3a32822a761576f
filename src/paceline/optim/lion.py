"""`Lion`: steps of one size for every element, in the direction of the sign of an average.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Half of Adam's states. torch has none.

    Args:
        params: as for torch's optimizers.
        lr: size of each element's step.
        betas: weight of the average in the direction, and in the average itself.
        weight_decay: decoupled, times `lr`.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
                parameter.add_(
                    torch.lerp(state["exp_avg"], parameter.grad, 1 - first).sign_(), alpha=-float(group["lr"])
                )
                state["exp_avg"].lerp_(parameter.grad, 1 - second)
        return loss
