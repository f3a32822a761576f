"""Autocast and gradient scalers as accelerate makes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline_accelerate.host import get_current_device_type
from paceline_accelerate.state import AcceleratorState


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Returns autocast to the precision of the state's accelerator, or without `native_amp` a context that does nothing.

    Args:
        native_amp: whether there is mixed precision.
        autocast_kwargs: an `AutocastKwargs`, for `enabled` and `cache_enabled`.
    """
    if not native_amp:
        return nullcontext()
    state: Any = AcceleratorState()
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(device_type=state.device.type, dtype=dtypes.get(str(state.mixed_precision)), **options)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """torch's gradient scaler for the accelerator of this host; without one it is switched off, as torch says."""
    device_type, _ = get_current_device_type()
    return torch.amp.GradScaler(device_type, **kwargs)
