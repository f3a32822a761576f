"""What a model was wrapped in: compiled, replicated, cast; and gradient scalers as accelerate makes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.compat.accelerate.state import AcceleratorState
from paceline.precision.policy import unwrap_forward


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` made it."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a part of it was compiled."""
    return any(is_compiled_module(each) for each in module.modules())


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The module inside DDP (and, on request, without mixed precision and `torch.compile`)."""
    compiled = model if is_compiled_module(model) else None
    inner = model._orig_mod if compiled is not None else model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = inner.module
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
    if compiled is not None and keep_torch_compile and inner is compiled._orig_mod:
        return compiled
    return inner


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Autocast to the precision of the state's accelerator; without `native_amp` nothing.

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
    accelerator = torch.accelerator.current_accelerator()
    return torch.amp.GradScaler("cuda" if accelerator is None else accelerator.type, **kwargs)
