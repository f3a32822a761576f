"""Gradient communication in fewer bytes: bf16, fp16 and PowerSGD.

torch's own bf16 hook refuses every backend but NCCL and XCCL; ours is plain arithmetic and runs on gloo too.
Source of PowerSGD: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019. `power_sgd` is torch's
implementation. `batched_power_sgd` is ours, since torch's fails at the first step that it compresses.
"""

from __future__ import annotations

import math
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

    def index(self) -> int:
        """Its number among the buckets of the model."""

    def is_last(self) -> bool:
        """Whether it is the last one of a backward pass."""


Hook = Callable[[Any, Bucket], Future[Tensor]]
HOOKS = ("bf16", "fp16", "power_sgd", "batched_power_sgd")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _compressed(dtype: torch.dtype, group: dist.ProcessGroup, bucket: Bucket) -> Future[Tensor]:
    """Averages a bucket in `dtype` and hands it back in its own; divides first, so that the sum stays in range."""
    buffer = bucket.buffer()
    small = buffer.to(dtype).div_(dist.get_world_size(group))
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def _averaged(group: dist.ProcessGroup, buffer: Tensor) -> Future[Tensor]:
    """Averages a bucket as DDP does."""
    buffer.div_(dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    averaged: Future[Tensor] = future.then(_value)
    return averaged


def _batched_power_sgd(state: Any, bucket: Bucket) -> Future[Tensor]:
    """Sends a bucket as two thin matrices: PowerSGD with all gradients of the bucket as one square matrix.

    The matrix M of a rank is approximated by P @ Q.T with `matrix_approximation_rank` columns. One power iteration finds both:
    P is an orthonormal basis of the sum of all M @ Q, and Q the mean of all M.T @ P. `state` is a `PowerSGDState` of torch.
    """
    gradients = bucket.buffer()
    compresses = state.iter >= state.start_powerSGD_iter
    state.maybe_increase_iter(bucket)
    if not compresses:
        return _averaged(state.process_group, gradients)

    side = math.ceil(math.sqrt(gradients.numel()))
    # In float32, as bf16 and fp16 have no QR decomposition.
    matrix = torch.zeros(side * side, dtype=torch.float32, device=gradients.device)
    matrix[: gradients.numel()] = gradients
    number = bucket.index()
    if number in state.error_dict:
        matrix += state.error_dict[number]
    matrix = matrix.view(side, side)

    q = state.q_memory_dict.get(number)
    if q is None or not state.warm_start:
        q = _random_columns(state, side).to(gradients.device)
    p = (matrix @ _orthonormal(q)).to(gradients.dtype)
    # It waits here and not in a callback: callbacks that wait use up the threads of gloo.
    dist.all_reduce(p, group=state.process_group)
    basis = _orthonormal(p.float())
    q = (matrix.t() @ basis).to(gradients.dtype)
    q.div_(dist.get_world_size(state.process_group))
    future = dist.all_reduce(q, group=state.process_group, async_op=True).get_future()

    def decompress(done: Future[Any]) -> Tensor:
        q = _value(done).float()
        approximation = (basis @ q.t()).view(-1)
        if state.warm_start:
            state.q_memory_dict[number] = q
        if state.use_error_feedback:
            # What the approximation leaves out is added to the gradients of the next step.
            state.error_dict[number] = matrix.view(-1) - approximation
        gradients.copy_(approximation[: gradients.numel()])
        return gradients

    decompressed: Future[Tensor] = future.then(decompress)
    return decompressed


def _random_columns(state: Any, side: int) -> Tensor:
    """The same on all ranks, and others at each call. Shape: [side, columns]."""
    generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
    columns = min(state.matrix_approximation_rank, side)
    return torch.randn(side, columns, generator=generator)


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns; a matrix of zeros gives one too. Shape: that of `matrix`."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis


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
    if name in ("power_sgd", "batched_power_sgd"):
        hook: Hook = _batched_power_sgd if name == "batched_power_sgd" else powerSGD_hook.powerSGD_hook
        keywords = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, **state}
        hook_state: Any = powerSGD_hook.PowerSGDState(group, **keywords)
    else:
        hook = partial(_compressed, _HALVES[name])
        hook_state = group
    if wrapper in _HALVES:
        hook = partial(_wrapped, _HALVES[wrapper], hook)
    # torch reads a hook's annotations, which must be the classes themselves and not text.
    inner = hook

    def registered(state: Any, bucket: Bucket) -> Future[Tensor]:
        return inner(state, bucket)

    bucket_class = dist.GradBucket  # type: ignore[attr-defined]
    registered.__annotations__ = {"bucket": bucket_class, "return": Future[Tensor]}
    model.register_comm_hook(hook_state, registered)
