"""Gradient communication in fewer bytes: bf16, fp16 and PowerSGD.

torch's own bf16 hook refuses every backend but NCCL and XCCL; ours is plain arithmetic and runs on gloo too.
Source of PowerSGD: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019 (torch's implementation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class Bucket(Protocol):
    """What a hook uses of `torch.distributed.GradBucket`: the gradients that are sent together, flat."""

    def buffer(self) -> Tensor:
        """Shape: [elements]."""

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor of as many elements in its place."""


Hook = Callable[[Any, Bucket], Future[Tensor]]
HOOKS = ("bf16", "fp16", "power_sgd")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _compressed(dtype: torch.dtype, group: dist.ProcessGroup, bucket: Bucket) -> Future[Tensor]:
    """Averages a bucket in `dtype` and hands it back in its own; divides first, so that the sum stays in range."""
    buffer = bucket.buffer()
    small = buffer.to(dtype).div_(dist.get_world_size(group))
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def _wrapped(dtype: torch.dtype, hook: Hook, state: object, bucket: Bucket) -> Future[Tensor]:
    """Runs another hook on the bucket in `dtype`."""
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype))
    return hook(state, bucket).then(lambda done: buffer.copy_(_value(done)))


def _value(done: Future[Any]) -> Tensor:
    value: Tensor | list[Tensor] = done.value()
    return value[0] if isinstance(value, list) else value


def install(
    model: DistributedDataParallel, name: str, wrapper: str, group: dist.ProcessGroup, state: Mapping[str, Any]
) -> None:
    """Registers a hook on a DDP model.

    Args:
        name: one of `HOOKS`.
        wrapper: "none", "bf16" or "fp16": the dtype that PowerSGD's own tensors travel in.
        state: keywords of PowerSGD's state, such as `matrix_approximation_rank`.
    """
    if name == "power_sgd":
        hook: Hook = powerSGD_hook.powerSGD_hook
        hook_state: Any = powerSGD_hook.PowerSGDState(
            group, **{"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, **state}
        )
    else:
        hook = partial(_compressed, _HALVES[name])
        hook_state = group
    if wrapper in _HALVES:
        hook = partial(_wrapped, _HALVES[wrapper], hook)
    # torch reads a hook's annotations, which must be the classes themselves and not text.
    inner = hook

    def registered(state: object, bucket: Bucket) -> Future[Tensor]:
        return inner(state, bucket)

    bucket_class = dist.GradBucket  # type: ignore[attr-defined]
    registered.__annotations__ = {"bucket": bucket_class, "return": Future[Tensor]}
    model.register_comm_hook(hook_state, registered)
