"""`Lion`: steps of one size for every element, in the direction of the sign of an average.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Lion(Optimizer):
    """Half of Adam's states. torch has none.

    Args:
        params: as for torch's optimizers.
        lr: size of each element's step.
        betas: weight of the average in the direction, and in the average itself.
        weight_decay: decoupled, times `lr`.
    """

    elementwise: ClassVar[bool] = True  # a plan may divide parameters by rows: no element looks at another

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                rate = float(group["lr"])
                # The direction weighs this gradient otherwise than the average does, so the average is updated after it.
                direction = torch.lerp(state["exp_avg"], parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(direction, alpha=-rate)
                state["exp_avg"].lerp_(parameter.grad, 1 - second)
        return loss
