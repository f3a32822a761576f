"""The loss scaler: keeps float16 gradients in range, and says why a run cannot go on.

`torch.amp.GradScaler` does the arithmetic, on the CPU too. Here are the two things that it leaves open: whether a step
was skipped (known from the flag that the step computed anyway, so at no further synchronisation), and what to do when
the loss itself is not finite, which no scale can mend.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.base.errors import TrainError
from paceline.world.sharded import local


class _PartScaler(torch.amp.GradScaler):
    """Unscales this rank's parts of divided gradients: torch's own refuses them beside plain ones, or of two meshes."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parts = type("Parts", (), {"param_groups": [{"params": [_part(p) for p in parameters]}]})
        return super()._unscale_grads_(parts, inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is this rank's part of the parameter's; the parameter itself where it is not divided."""
    if local(parameter) is parameter:
        return parameter
    part = local(parameter).detach()
    part.grad = local(parameter.grad)
    return part


class LossScaler:
    """A dynamic loss scale shared by all optimizers of a run.

    Args:
        device: where the model computes.
        collectives: agrees over ranks, at skipped steps only, whether a loss was not finite.
        agree: whether ranks see different gradients, and so must agree on overflows (parameters are divided).
        options: keywords of `torch.amp.GradScaler` (`init_scale`, `growth_interval`, ...).
    """

    def __init__(self, device: torch.device, collectives: Any, agree: bool = False, **options: Any) -> None:
        self.agree = agree
        self._device = device
        self.grad_scaler = _PartScaler(device.type, **options)
        self._collectives = collectives
        self._loss: torch.Tensor | None = None
        self._unscaled: set[int] = set()
        self._stepped = False

    def refresh(self) -> None:
        """Adapts the scale to the steps taken since; called where a window begins.

        Not at the step itself: gradients of a second optimizer, computed at the same scale, may still wait for theirs.
        """
        if self._stepped:
            self._stepped = False
            self._unscaled.clear()
            self.grad_scaler.update()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        self._loss = loss.detach()
        return self.grad_scaler.scale(loss)

    def watch(self, loss: torch.Tensor) -> None:
        """Remembers a loss that was scaled elsewhere, for the error that explains why it is not finite."""
        self._loss = loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, once for each step."""
        if id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            self.grad_scaler.unscale_(optimizer)
            if self.agree:
                self._agree(optimizer)

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        """What overflowed on one rank did so on all; a rank that holds none of the optimizer's parameters counts too."""
        found = self.grad_scaler._found_inf_per_device(optimizer)
        flags = [flag.detach().reshape(()) for flag in found.values()]
        worst = torch.stack(flags).max() if flags else torch.zeros((), device=self._device)
        worst = self._collectives.reduce(worst).clamp_(max=1.0)
        for flag in found.values():
            flag.copy_(worst.view_as(flag))
        if not found:
            self.grad_scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {self._device: worst}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
        """Steps the optimizer unless a gradient overflowed.

        Returns:
            Whether the step was skipped; the same on every rank.

        Raises:
            TrainError: `fp16-loss`, where it was skipped because the loss itself is not finite.
        """
        self.unscale(optimizer)
        found = self.grad_scaler._found_inf_per_device(optimizer)
        self.grad_scaler.step(optimizer, *args, **kwargs)
        self._stepped = True
        skipped = any(bool(flag) for flag in found.values())
        if skipped:
            self._explain()
        return skipped

    def _explain(self) -> None:
        bad = self._loss is not None and not bool(torch.isfinite(self._loss).all())
        if self._collectives.any(bad):
            raise TrainError(
                "fp16-loss",
                "the loss is not a finite number, so its gradients are not either.",
                why="mixed_precision='fp16': scaling keeps gradients in range, but it cannot mend a loss that overflowed "
                "in the forward pass (float16 ends at 65504) or is NaN by itself",
                fix="use mixed_precision='bf16', or find the operation with `torch.autograd.set_detect_anomaly(True)`; "
                "weights are those of the last good step, and saved checkpoints are untouched",
            )

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth counter."""
        self.refresh()
        return self.grad_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        self.refresh()  # what the last step here would have changed must not change what is loaded
        self.grad_scaler.load_state_dict(state)
