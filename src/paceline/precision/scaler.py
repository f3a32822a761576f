"""The loss scaler: keeps float16 gradients in range, and says why a run cannot go on.

`torch.amp.GradScaler` does the arithmetic, on the CPU too: ONE scale, held by it, multiplies the loss and divides the
gradients, and changes only where a window begins. Where the scale goes is `scale.Growth`'s business. Here is the rest:
whether a step was skipped (known from the flag that the step computed anyway, so at no further synchronisation), and what to
do where no scale can help: the loss itself is not finite, or the scale has reached its minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.base.errors import ConfigError, TrainError
from paceline.base.log import warn_once
from paceline.precision.scale import Growth
from paceline.torch_internals.grad_scaler import check_before_step, forget, overflow_flags, set_overflow_flag
from paceline.world.collectives import Collectives
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import gradient_holder, local


class _PartScaler(torch.amp.GradScaler):
    """Unscales the local tensors of gradients: torch's own scaler refuses DTensors beside plain tensors, or of two meshes."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with_gradients = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        # torch's method reads only the attribute `param_groups` of the optimizer.
        holders = list(map(gradient_holder, with_gradients))
        # Gradients of offloaded parameters are on the host. torch would copy these two numbers there without a wait, and its
        # kernel would read them too early.
        on_host = [holder for holder in holders if holder.grad is not None and holder.grad.is_cpu]
        if on_host and not inv_scale.is_cpu:
            check_before_step(optimizer)
            inv_scale = inv_scale.cpu()
            found_inf = found_inf.cpu()
        parts = type("Parts", (), {"param_groups": [{"params": holders}]})
        return super()._unscale_grads_(parts, inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]


class LossScaler:
    """A dynamic loss scale shared by all optimizers of a run.

    Args:
        device: where the model computes.
        collectives: exchanges overflows, and for skipped steps the reasons.
        is_divided: returns whether ranks have different gradients, and so must exchange overflows; called at each step.
        named_parameters: returns names and parameters of the prepared models, for errors.
        enabled: False leaves losses and gradients as they are.
        bad_loss: "raise" ends the run if the loss itself is not finite; "skip" skips that step like any overflow.
        at_minimum: "raise" ends the run at an overflow at the minimum of the scale; "skip" warns once and skips the step.
        options: how the scale changes; see `Growth`.

    Attributes:
        growth: the scale and how it changes.
        skipped_steps: the number of steps that were skipped because of overflows.

    Raises:
        ConfigError: `scaler-option`.
    """

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        is_divided: Callable[[], bool] = lambda: False,
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: (),
        *,
        enabled: bool = True,
        bad_loss: str = "raise",
        at_minimum: str = "raise",
        **options: float,
    ) -> None:
        for name, value in (("bad_loss", bad_loss), ("at_minimum", at_minimum)):
            if value not in ("raise", "skip"):
                fix = "write 'raise' or 'skip'"
                raise ConfigError("scaler-option", f"scaler option {name}={value!r} means nothing.", fix=fix)
        self.growth = Growth.of(options)
        self._is_divided = is_divided
        self._named_parameters = named_parameters
        self._device = device
        self.grad_scaler = _PartScaler(device.type, init_scale=self.growth.scale, enabled=enabled)
        self._collectives = collectives
        self._raises = bad_loss == "raise"
        self._raises_at_minimum = at_minimum == "raise"
        self._loss: Tensor | None = None
        self._unscaled: set[int] = set()
        self._stepped = False
        self._overflow = False
        self._steps = 0
        self.skipped_steps = 0
        self._last_good_step = 0  # the last step without an overflow

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        # The change by the last step is applied when the next window begins, see `refresh`. It is computed ahead on a copy.
        ahead = copy(self.growth)
        if self._stepped:
            ahead.update(self._overflow)
        return ahead.scale

    cur_scale = loss_scale

    def refresh(self) -> None:
        """Adapts the scale to the steps since the last call; called when a window begins.

        The scale must not change at the step itself: gradients of a second optimizer, which were computed with the same scale,
        may not have been stepped yet.
        """
        if self._stepped:
            self._steps += 1
            if not self._overflow:
                self._last_good_step = self._steps
            self.growth.update(self._overflow)
            self.grad_scaler.update(self.growth.scale)
            self._stepped = False
            self._overflow = False
            self._unscaled.clear()

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        self._loss = loss.detach()
        return self.grad_scaler.scale(loss)

    def watch(self, loss: Tensor) -> None:
        """Records a loss that was scaled elsewhere, for the error that is raised if it is not finite."""
        self._loss = loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, once for each step."""
        if id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            self.grad_scaler.unscale_(optimizer)
            if self._is_divided():
                self._agree_on_overflow(optimizer)

    def _agree_on_overflow(self, optimizer: Optimizer) -> None:
        """Exchanges overflows, so that a step is skipped on all ranks. Ranks: all, also those without its parameters."""
        overflow_by_device = overflow_flags(self.grad_scaler, optimizer)
        # A rank without gradients of this optimizer takes part too, with no overflow.
        worst = torch.zeros((), device=self._device)
        flags = [flag.detach().reshape(()).to(self._device) for flag in overflow_by_device.values()]
        if flags:
            worst = torch.stack(flags).max()
        worst = self._collectives.reduce(worst).clamp_(max=1.0)
        for flag in overflow_by_device.values():
            flag.copy_(worst.view_as(flag))
        # torch's scaler refuses a step for which it has no flag.
        if not overflow_by_device:
            set_overflow_flag(self.grad_scaler, optimizer, worst)

    def step(self, optimizer: Optimizer) -> bool:
        """Steps the optimizer unless a gradient overflowed.

        Returns:
            Whether the step was skipped; the same on every rank.

        Raises:
            TrainError: `fp16-loss`, if it was skipped because the loss itself is not finite; `fp16-minimum`, if the scale
                cannot become smaller.
        """
        self.unscale(optimizer)
        overflow_by_device = overflow_flags(self.grad_scaler, optimizer)
        self.grad_scaler.step(optimizer)
        self._stepped = True
        # torch's step has copied these flags to the host already, so that there is nothing more to wait for.
        skipped = any(bool(flag) for flag in overflow_by_device.values())
        self._overflow |= skipped
        self.skipped_steps += skipped
        if skipped and (self._raises or self.growth.exhausted):
            self._explain()
        return skipped

    def forget(self, optimizer: Optimizer) -> None:
        """Forgets gradients that are not stepped: they do not change the scale, and those of the next window are unscaled."""
        self._unscaled.discard(id(optimizer))
        forget(self.grad_scaler, optimizer)

    def _explain(self) -> None:
        # A step is skipped on all ranks or on none, so all of them come here and may exchange what they know.
        bad_here = self._loss is not None and not bool(torch.isfinite(self._loss).all())
        bad_loss = self._collectives.any(bad_here)
        if bad_loss and self._raises:
            raise TrainError(
                "fp16-loss",
                "the loss is not a finite number, so its gradients are not either.",
                why="mixed_precision='fp16': scaling keeps gradients in range, but it cannot repair a loss that overflowed "
                "in the forward pass (float16 ends at 65504) or is NaN by itself",
                fix="use mixed_precision='bf16', or find the operation with `torch.autograd.set_detect_anomaly(True)`; "
                "weights are those of the last good step, and saved checkpoints are untouched",
            )
        if self.growth.exhausted and not self._raises_at_minimum:
            warn_once(
                "precision",
                f"gradients overflow at the smallest loss scale that is allowed, {self.growth.scale:g}. Such steps are "
                "skipped, and the run goes on. If the loss does not recover, use bf16, or lower the learning rate.",
            )
            return
        if self.growth.exhausted:
            why = [
                f"every step since number {self._last_good_step + 1} overflowed, this one is number {self._steps + 1}"
            ]
            if bad_loss:
                why.append("the loss itself is not finite, which no scale can repair")
            bad_gradients = list(filter(None, self._collectives.gather_object(self._first_bad())))
            if bad_gradients:
                why.append(f"the first gradient that is not finite: {bad_gradients[0]}")
            raise TrainError(
                "fp16-minimum",
                f"gradients overflow at the smallest loss scale that is allowed, {self.growth.scale:g}.",
                why=why,
                fix="use bf16, which needs no scale; or lower the learning rate, or the scaler's min_scale (DeepSpeed: "
                "fp16.min_loss_scale); weights are those of the last good step",
            )

    def _first_bad(self) -> str | None:
        """Returns the name of this rank's first parameter with a gradient that is not finite, or None."""
        for name, parameter in self._named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all()):
                return f"{name} (rank {self._collectives.world.rank})"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters, with the names of torch's scaler; empty if it is not enabled."""
        self.refresh()
        if not self.grad_scaler.is_enabled():
            return {}
        return self.growth.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict`, here or of torch's scaler, has returned."""
        self.refresh()  # a pending change by the last step must not be applied to the loaded scale
        self.grad_scaler.load_state_dict(state)
        if self.grad_scaler.is_enabled():
            self.growth.load_state_dict(state)
