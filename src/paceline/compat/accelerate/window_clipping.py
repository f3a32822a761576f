"""Clipping inside of an accumulation window, where Paceline's own accelerator does nothing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from paceline.accelerator import Accelerator
from paceline.base.errors import TrainError


def clips_inside_window(accelerator: Accelerator) -> bool:
    """Whether the gradients that have accumulated so far are clipped, as accelerate does wherever a script asks for it.

    Divided parameters have no whole gradients before the end of a window. Scaled gradients cannot be clipped there either,
    because a scaler divides them by the scale only once in a window.
    """
    if accelerator.gradients.sync or accelerator.scaler is not None:
        return False
    return accelerator.plan.layout.size("shard", "tp", "pp") == 1


def clip_grad_value(
    accelerator: Accelerator, parameters: Tensor | Iterable[Tensor], clip_value: float, engine: object
) -> None:
    """Clamps gradients to [-clip_value, clip_value], also inside of an accumulation window.

    Args:
        accelerator: its plan and its window decide what is clipped.
        parameters: parameters with gradients.
        clip_value: the largest absolute value.
        engine: the DeepSpeed engine, or None.

    Raises:
        TrainError: `deepspeed-step`, if there is an engine, because it has stepped already.
    """
    if engine is not None:
        what = "`clip_grad_value_` has no effect under DeepSpeed."
        fix = "set `gradient_clipping` in the DeepSpeed config, or call `clip_grad_norm_`"
        raise TrainError("deepspeed-step", what, why="`accelerator.backward` has stepped already", fix=fix)
    if clips_inside_window(accelerator):
        nn.utils.clip_grad_value_(parameters, clip_value)
    else:
        Accelerator.clip_grad_value_(accelerator, parameters, clip_value)
