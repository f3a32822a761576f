"""The loss scaler: keeps float16 gradients in range, and says why a run cannot go on.

`torch.amp.GradScaler` does the arithmetic, on the CPU too: ONE scale, held by it, multiplies the loss and divides the
gradients. Where the scale goes is `scale.Growth`'s business. Here is the rest: which parameters are unscaled, whether a step
was skipped (known from the flag that the step computed anyway, so at no further synchronisation), and what to do where no scale
can help: the loss itself is not finite, or the scale has reached its minimum.

    before a backward pass     every gradient has the present scale: those that were unscaled get it again, and all of them
                               follow a change of the scale (a power of two, which does not round)
    clip, step                 the gradients of these parameters are unscaled, once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.base.errors import ConfigError, TrainError
from paceline.base.log import warn_once
from paceline.precision.scale import Growth
from paceline.torch_internals.grad_scaler import check_before_step, give_flag, unscale
from paceline.torch_internals.tensors import multiply_in_place, times_written
from paceline.world.collectives import Collectives
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import gradient_holder, local


class LossScaler:
    """A dynamic loss scale shared by all optimizers of a run.

    Args:
        device: where the model computes.
        collectives: exchanges overflows, and for skipped steps the reasons.
        is_divided: returns whether ranks have different gradients, and so must exchange overflows; called at each step.
        named_parameters: returns names and parameters of the prepared models, for errors.
        held: returns every parameter with each of its gradients: the one in `.grad`, and those that strategies hold.
        older: returns copies of gradients from before the open windows, which follow the scale as these gradients do.
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
        held: Callable[[], Iterable[tuple[Tensor, Tensor]]] = lambda: (),
        older: Callable[[], Iterable[Tensor]] = lambda: (),
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
        self._held = held
        self._older = older
        self.grad_scaler = torch.amp.GradScaler(device.type, init_scale=self.growth.scale, enabled=enabled)
        self._collectives = collectives
        self._raises = bad_loss == "raise"
        self._raises_at_minimum = at_minimum == "raise"
        self._loss: Tensor | None = None
        # Of a parameter whose gradient is unscaled: whether a gradient overflowed that was unscaled with it. Of an optimizer
        # whose gradients are all unscaled, on all ranks: whether one of them overflowed.
        self._flags: dict[Tensor, Tensor] = {}
        self._complete: dict[Optimizer, Tensor] = {}
        self._as_computed: dict[Tensor, tuple[int, int]] = {}  # which gradients a pass has left, and how often written
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
        """Adapts the scale to the steps since the last call; called before each backward pass.

        The scale must not change at the step itself: gradients of a second optimizer, which were computed with the same scale,
        may not have been stepped yet.
        """
        if not self._stepped:
            return
        self._steps += 1
        if not self._overflow:
            self._last_good_step = self._steps
        before = self.growth.scale
        self.growth.update(self._overflow)
        self.grad_scaler.update(self.growth.scale)
        self._stepped = False
        self._overflow = False
        if self.growth.scale != before:
            scaled = [gradient for parameter, gradient in self._held() if parameter not in self._flags]
            _multiply([*scaled, *self._older()], self.growth.scale / before)

    def begin_pass(self) -> None:
        """Gives all gradients the scale of the backward pass that follows, which adds to them."""
        self.refresh()
        if self._flags:
            unscaled = [gradient for parameter, gradient in self._held() if parameter in self._flags]
            _multiply(unscaled, self.growth.scale)
            self._flags.clear()
        # Also of an optimizer that had no gradient when another one's were unscaled: it was complete without having a flag.
        self._complete.clear()

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        self._loss = loss.detach()
        return self.grad_scaler.scale(loss)

    def pass_ended(self) -> None:
        """Notes the gradients that the pass has left, which still have the scale."""
        self._as_computed = {}
        for parameter, gradient in self._held():
            self._as_computed[parameter] = (id(gradient), times_written(gradient))

    def look_for_changes(self, parameters: Iterable[Tensor]) -> None:
        """Warns once if a script has changed gradients that still have the scale, as torch's own clipping does."""
        for parameter in filter(self._is_scaled, parameters):
            gradient = parameter.grad
            before = self._as_computed.get(parameter)
            if gradient is not None and before not in (None, (id(gradient), times_written(gradient))):
                warn_once(
                    "precision",
                    "gradients were changed between `backward` and the step, while they are still multiplied by the loss scale "
                    "of fp16. To compare them with a number, as `torch.nn.utils.clip_grad_norm_` does, or to add to them, is "
                    "wrong there: write `accelerator.clip_grad_norm_(model.parameters(), 1.0)`, or call "
                    "`accelerator.unscale_gradients()` before. Where you only multiply by a factor, nothing is wrong.",
                )
                return

    def watch(self, loss: Tensor) -> None:
        """Records a loss that was scaled elsewhere, for the error that is raised if it is not finite."""
        self._loss = loss

    def unscale(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Divides gradients by the scale, those that were not divided yet.

        Args:
            parameters: the ones whose gradients are needed.
            optimizers: all of the run. An overflow in the gradients of one of them skips its steps, and no other's.

        Ranks: all, if ranks have different gradients.
        """
        if not self.grad_scaler.is_enabled():
            return
        chosen = {id(parameter): parameter for parameter in parameters}
        groups: list[list[Tensor]] = []
        num_left: list[int] = []  # of each optimizer, parameters that stay as they are
        for optimizer in optimizers:
            own = parameters_of(optimizer)
            groups.append([parameter for parameter in own if chosen.pop(id(parameter), None) is not None])
            num_left.append(sum(self._is_scaled(parameter) for parameter in own) - len(self._scaled(groups[-1])))
        groups.append(list(chosen.values()))  # which no optimizer steps
        flags = [self._unscale(group) for group in groups]
        if self._is_divided():
            flags, num_left = self._agreed(flags, num_left)
        for group, flag in zip(groups, flags, strict=True):
            for parameter in group:
                # An overflow that was found before in a part of the group is in its own flag.
                self._flags.setdefault(parameter, flag)
        for optimizer, flag, left in zip(optimizers, flags, num_left, strict=False):
            if not left:
                self._complete[optimizer] = self._worst(optimizer, flag)

    def _is_scaled(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and parameter not in self._flags

    def _scaled(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [parameter for parameter in parameters if self._is_scaled(parameter)]

    def _unscale(self, parameters: Iterable[Tensor]) -> Tensor:
        """Unscales gradients, and returns whether one of them overflowed. Shape: []."""
        holders = list(map(gradient_holder, self._scaled(parameters)))
        worst = torch.zeros((), device=self._device)
        on_host = [holder for holder in holders if holder.grad is not None and holder.grad.is_cpu]
        elsewhere = [holder for holder in holders if holder.grad is not None and not holder.grad.is_cpu]
        for side in (on_host, elsewhere):
            if side:
                for flag in unscale(self.grad_scaler, side):
                    worst = torch.maximum(worst, flag.detach().reshape(()).to(self._device))
        return worst

    def _agreed(self, flags: Sequence[Tensor], num_left: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Adds up overflows and counts, so that a step is skipped on all ranks. Ranks: all, also those without parameters."""
        counts = torch.tensor(num_left, dtype=torch.float32, device=self._device)
        total = self._collectives.reduce(torch.cat([torch.stack(list(flags)), counts]))
        agreed = total.clamp(max=1.0)[: len(flags)]
        return list(agreed.unbind()), list(map(round, total[len(flags) :].tolist()))

    def _worst(self, optimizer: Optimizer, flag: Tensor) -> Tensor:
        """Returns whether a gradient of an optimizer overflowed, in this call or in an earlier one."""
        flags = {id(flag): flag}
        for parameter in parameters_of(optimizer):
            known = self._flags.get(parameter)
            if known is not None:
                flags[id(known)] = known
        return torch.stack(list(flags.values())).max()

    def step(self, optimizer: Optimizer) -> bool:
        """Steps the optimizer unless a gradient overflowed.

        Returns:
            Whether the step was skipped; the same on every rank.

        Raises:
            TrainError: `fp16-loss`, if it was skipped because the loss itself is not finite; `fp16-minimum`, if the scale
                cannot become smaller.
        """
        if not self.grad_scaler.is_enabled():
            optimizer.step()
            return False
        if optimizer not in self._complete:
            self.unscale(parameters_of(optimizer), [optimizer])
        flag = self._complete.pop(optimizer)
        if self._device.type != "cpu" and any(p.grad is not None and p.grad.is_cpu for p in parameters_of(optimizer)):
            check_before_step(optimizer)
        give_flag(self.grad_scaler, optimizer, flag)
        self.grad_scaler.step(optimizer)
        self._stepped = True
        # torch's step has copied this flag to the host already, so that there is nothing more to wait for.
        skipped = bool(flag)
        self._overflow |= skipped
        self.skipped_steps += skipped
        if skipped and (self._raises or self.growth.exhausted):
            self._explain()
        return skipped

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Called where gradients were cleared."""
        if self._flags:
            for parameter in parameters:
                self._flags.pop(parameter, None)

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


def _multiply(gradients: list[Tensor], factor: float) -> None:
    # One tensor may be the gradient of two parameters.
    different = {id(gradient): gradient for gradient in gradients}
    if different:
        multiply_in_place(list(map(local, different.values())), factor)
