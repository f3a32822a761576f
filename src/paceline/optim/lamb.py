"""`Lamb`: Adam's direction, each parameter's step scaled by the ratio of its norm to that of the direction.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

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

    def __init__(
        self,
        params: Any,
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
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        steps = float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(parameter.grad, 1 - first)  # type: ignore[arg-type]
        square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)  # type: ignore[arg-type]
        root = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])
        direction = mean / root
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        size = float(group["lr"])
        if group["bias_correction"]:
            size *= (1 - second**steps) ** 0.5 / (1 - first**steps)
        weight, length = (whole(torch.linalg.vector_norm(each)) for each in (parameter, direction))
        ratio = (weight / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (length > 0), ratio, torch.ones_like(ratio))
        parameter.sub_(direction * float(ratio * size))
