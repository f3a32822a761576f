"""Activations in host memory: what the blocks of a model save for the backward pass is copied there, and back in time.

    forward     each tensor that a block saves -> a copy on the host, on a stream beside the computation
    backward    the first of a block's tensors that is needed -> all of this block and of the one before it are fetched

The same values come back in the same layout, so gradients have the same bits. Parameters and buffers stay where they are. A
block that is computed again (`recompute`) saves its inputs alone.

Source: PyTorch's `saved_tensors_hooks`; the order of fetches is that of Rhu et al., "vDNN", MICRO 2016.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.torch_internals.tensors import dtensor
from paceline.world.forward import override_forward
from paceline.world.sharded import is_sharded, local

SMALLEST = 1 << 10  # bytes: a smaller tensor costs more to copy than it saves


@dataclass(eq=False)
class _HostTensor:
    """One tensor on the host.

    Attributes:
        host: its values.
        shape, stride: of the tensor on the device.
        fetched: the tensor, from when it is fetched until it is used.
        arrived: on accelerators, the event behind the copy.
    """

    host: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    fetched: Tensor | None = None
    arrived: torch.Event | None = None


@dataclass(eq=False)
class _BlockPass:
    """What one forward pass of one block has saved.

    Attributes:
        before: the pass before it, whose tensors the backward pass needs next. The graph alone keeps passes alive.
        saved: its tensors, in the order of the forward pass.
        is_begun: whether the backward pass has used one of them.
    """

    before: Callable[[], _BlockPass | None]
    saved: list[_HostTensor] = field(default_factory=list)
    is_begun: bool = False


class ActivationCopies:
    """Moves the activations of one model.

    Args:
        device: of the model.
        pinned: whether the copies lie in page-locked memory, without which copies are not asynchronous.
        kept_on_host: called with each copy.
    """

    def __init__(
        self, device: torch.device, pinned: bool, kept_on_host: Callable[[Tensor], object] = lambda copy: None
    ) -> None:
        self._device = device
        self._pinned = pinned
        self._kept_on_host = kept_on_host
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._last: Callable[[], _BlockPass | None] = lambda: None

    def attach(self, block: nn.Module) -> None:
        """Lets forward passes of a block save on the host."""

        def forward(block: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            with self._hooks(block):
                return original(*args, **kwargs)

        override_forward(block, "offload", forward)

    def _hooks(self, block: nn.Module) -> saved_tensors_hooks:
        block_pass = _BlockPass(self._last)
        self._last = weakref.ref(block_pass)
        # Asked in each pass: FSDP2 puts whole parameters in place for it.
        storages = [local(tensor).untyped_storage() for tensor in (*block.parameters(), *block.buffers())]
        # By identity, since tensors of a rehearsal have no addresses; `storages` keeps the objects alive.
        kept = {id(storage): storage for storage in storages}

        def pack(tensor: Tensor) -> Any:
            part: Tensor = local(tensor)
            if not self._moves(part) or id(part.untyped_storage()) in kept:
                return tensor
            saved = self._copied(part)
            block_pass.saved.append(saved)
            like = None
            if is_sharded(tensor):
                like = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
            return block_pass, saved, like

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            block_pass, saved, like = packed
            part = self._taken(block_pass, saved)
            return part if like is None else dtensor(part, *like)

        return saved_tensors_hooks(pack, unpack)

    def _moves(self, part: Tensor) -> bool:
        if part.layout is not torch.strided or part.device.type != self._device.type or part.nbytes < SMALLEST:
            return False
        # An expanded tensor has less memory than elements.
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        return span >= part.numel()

    def _copied(self, part: Tensor) -> _HostTensor:
        part = part.detach()
        saved = _HostTensor(torch.empty_like(part, device="cpu", pin_memory=self._pinned), part.shape, part.stride())
        self._kept_on_host(saved.host)
        if self._stream is None:
            saved.host.copy_(part)
            return saved
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            saved.host.copy_(part, non_blocking=True)
        # Its memory is not given to another tensor before the copy has ended.
        part.record_stream(self._stream)
        return saved

    def _taken(self, block_pass: _BlockPass, saved: _HostTensor) -> Tensor:
        """Returns a saved tensor on the device, and begins to fetch what comes after it."""
        if not block_pass.is_begun:
            block_pass.is_begun = True
            before = block_pass.before()
            of_before = before.saved if before is not None else []
            # The last that was saved is needed first.
            for other in (*reversed(block_pass.saved), *reversed(of_before)):
                self._fetch(other)
        # Again, if the graph is retained for a second backward pass.
        self._fetch(saved)
        tensor = saved.fetched
        assert tensor is not None
        saved.fetched = None
        if saved.arrived is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(saved.arrived)
            tensor.record_stream(stream)
        return tensor

    def _fetch(self, saved: _HostTensor) -> None:
        if saved.fetched is not None:
            return
        # The same strides, also with gaps between elements: kernels choose by them in which order they add.
        if self._stream is None:
            saved.fetched = torch.empty_strided(saved.shape, saved.stride, dtype=saved.host.dtype)
            saved.fetched.copy_(saved.host)
            return
        # Behind the copy to the host, since both run on this stream.
        with self._stream:
            saved.fetched = torch.empty_strided(saved.shape, saved.stride, dtype=saved.host.dtype, device=self._device)
            saved.fetched.copy_(saved.host, non_blocking=True)
            saved.arrived = self._stream.record_event()
