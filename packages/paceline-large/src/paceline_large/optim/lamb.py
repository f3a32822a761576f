"""`Lamb`: Adam's direction, each parameter's step scaled by the ratio of its norm to that of the direction.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from paceline.world.sharded import whole


class Lamb(Optimizer):
    """Adam with a rate of its own for each parameter. torch has none; divided parameters are measured whole.

    Args:
        params: as for torch's optimizers.
        lr, betas, eps, weight_decay: as for Adam; decay is part of the direction.
        bias_correction: corrects the averages' slow start, in the size of the step.
        eps_inside_sqrt: adds `eps` under the root.
        max_coeff, min_coeff: bounds of the ratio.
    """

    elementwise: ClassVar[bool] = False  # each step is scaled by norms of the whole parameter

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
                        eps_inside_sqrt=eps_inside_sqrt, max_coeff=max_coeff, min_coeff=min_coeff)  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = float(state["step"])
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        mean.lerp_(parameter.grad, 1 - first)
        square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        if group["eps_inside_sqrt"]:
            root = (square + group["eps"]).sqrt_()
        else:
            root = square.sqrt().add_(group["eps"])
        direction = mean / root
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        size = float(group["lr"])
        if group["bias_correction"]:
            size *= (1 - second**steps) ** 0.5 / (1 - first**steps)
        # Of a divided parameter these are norms of the whole: the ranks compute them together.
        weight_norm = whole(torch.linalg.vector_norm(parameter))
        direction_norm = whole(torch.linalg.vector_norm(direction))
        ratio = (weight_norm / direction_norm).clamp(group["min_coeff"], group["max_coeff"])
        # Without a norm there is no ratio: such a parameter takes a step as Adam does.
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), ratio, torch.ones_like(ratio))
        parameter.sub_(direction * float(ratio * size))
