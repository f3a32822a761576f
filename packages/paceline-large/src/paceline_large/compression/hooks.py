"""Communication hooks by which `replicate` sends gradients in fewer bytes: bf16, fp16 and PowerSGD.

The hooks are those that torch has for DDP, but for `batched_power_sgd`: torch's fails at the first step that it compresses.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.data.means import Send


class GradientBucket:
    """Gradients that are sent together, with the methods of `torch.distributed.GradBucket`, for torch's hooks.

    Args:
        buffer: the gradients, one after the other. Shape: [elements].
        parameters: whose gradients they are.
        number: of the bucket among those of the model.
        is_last: whether it is the last bucket of a backward pass.
    """

    def __init__(self, buffer: Tensor, parameters: list[Tensor], number: int, is_last: bool) -> None:
        self._buffer = buffer
        self._parameters = parameters
        self._number = number
        self._is_last = is_last

    def buffer(self) -> Tensor:
        """Returns the gradients. Shape: [elements]."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the gradients."""
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Returns the parameters."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Returns each parameter's part of the buffer, in its shape."""
        rows = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [row.view(parameter.shape) for row, parameter in zip(rows, self._parameters, strict=True)]

    def index(self) -> int:
        """Returns the number of this bucket."""
        return self._number

    def is_last(self) -> bool:
        """Returns whether this is the last bucket of a backward pass."""
        return self._is_last


Hook = Callable[[Any, GradientBucket], Future[Tensor]]
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _batched_power_sgd(state: powerSGD_hook.PowerSGDState, bucket: GradientBucket) -> Future[Tensor]:
    """Applies PowerSGD to all gradients of a bucket at once, as one square matrix.

    The matrix M of a rank is approximated by P @ Q.T with `matrix_approximation_rank` columns. One power iteration finds both:
    P is an orthonormal basis of the sum of all M @ Q, and Q is the mean of all M.T @ P.

    Args:
        state: what is kept between steps.
        bucket: the gradients.

    Shape: M [side, side] with side = ceil(sqrt(elements)), filled up with zeros; P and Q [side, columns].
    """
    compresses = state.iter >= state.start_powerSGD_iter
    state.maybe_increase_iter(bucket)
    if not compresses:
        averaged: Future[Tensor] = default_hooks.allreduce_hook(state.process_group, bucket)
        return averaged

    gradients = bucket.buffer()
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
    # The wait is here and not in a callback: a callback that waits occupies one of gloo's two threads, and the all-reduce
    # for which it waits needs a thread, too.
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
            # The error of the approximation is added to the gradients of the next step, so that no part is lost for good.
            state.error_dict[number] = matrix.view(-1) - approximation
        gradients.copy_(approximation[: gradients.numel()])
        return gradients

    decompressed: Future[Tensor] = future.then(decompress)
    return decompressed


def _random_columns(state: powerSGD_hook.PowerSGDState, side: int) -> Tensor:
    """Draws columns that are the same on all ranks and new at each call. Shape: [side, columns]."""
    generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
    columns = min(state.matrix_approximation_rank, side)
    return torch.randn(side, columns, generator=generator)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, also for a matrix of zeros. Shape: that of `matrix`."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis


def _wrapped(dtype: torch.dtype, hook: Hook, state: object, bucket: GradientBucket) -> Future[Tensor]:
    """Runs another hook on the bucket in `dtype`, and casts its result back.

    torch's own wrappers copy the result into the cast buffer, so that DDP would get gradients in the wrong dtype.
    """
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype))
    return hook(state, bucket).then(lambda done: buffer.copy_(_value(done)))


def _value(done: Future[Any]) -> Tensor:
    value: Tensor | list[Tensor] = done.value()
    return value[0] if isinstance(value, list) else value


def sending(hook: Hook, state: object) -> Send:
    """Returns what averages buckets by a hook of torch's form, or of a script.

    Args:
        hook: the hook.
        state: its first argument.
    """

    def send(flat: Tensor, parameters: list[Tensor], number: int, is_last: bool) -> Callable[[], None]:
        future = hook(state, GradientBucket(flat, parameters, number, is_last))

        def wait() -> None:
            value = future.wait()
            value = value[0] if isinstance(value, list) else value
            if value.data_ptr() != flat.data_ptr():
                flat.copy_(value.view_as(flat))

        return wait

    return send


def _sending_by(name: str, wrapper: str, group: dist.ProcessGroup, state: Mapping[str, Any]) -> Send:
    return sending(*_hook_of(name, wrapper, group, state))


def _hook_of(name: str, wrapper: str, group: dist.ProcessGroup, state: Mapping[str, Any]) -> tuple[Hook, Any]:
    """Returns a hook, and the state with which it is called.

    Args:
        name: that of the option `replicate.comm_hook`.
        wrapper: "none", "bf16" or "fp16": the dtype in which PowerSGD's own tensors are sent.
        group: the ranks that average gradients.
        state: keywords of PowerSGD's state, such as `matrix_approximation_rank`.
    """
    hooks: dict[str, Hook] = {
        "bf16": default_hooks.bf16_compress_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": _batched_power_sgd,
    }
    hook = hooks[name]
    hook_state: Any = group
    if name in ("power_sgd", "batched_power_sgd"):
        keywords = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, **state}
        hook_state = powerSGD_hook.PowerSGDState(group, **keywords)
    if wrapper in _HALVES:
        hook = partial(_wrapped, _HALVES[wrapper], hook)
    return hook, hook_state


def install(
    model: DistributedDataParallel, name: str, wrapper: str, group: dist.ProcessGroup, state: Mapping[str, Any]
) -> None:
    """Registers a hook on a model that a script has wrapped in DDP itself."""
    hook, hook_state = _hook_of(name, wrapper, group, state)

    # DDP refuses torch's bf16 hook on every backend but NCCL and XCCL. It knows that hook by its name, so the function that
    # is registered has a name of its own: on gloo the hook computes the same.
    def registered(state: object, bucket: GradientBucket) -> Future[Tensor]:
        return hook(state, bucket)

    # DDP reads the annotations of a hook. It wants the classes themselves, and not their names as text.
    bucket_class = dist.GradBucket  # type: ignore[attr-defined]
    registered.__annotations__ = {"bucket": bucket_class, "return": Future[Tensor]}
    model.register_comm_hook(hook_state, registered)


BATCHED_POWER_SGD = partial(_sending_by, "batched_power_sgd")
BF16 = partial(_sending_by, "bf16")
FP16 = partial(_sending_by, "fp16")
POWER_SGD = partial(_sending_by, "power_sgd")
