"""Staging: the copy of one rank's share in the host's memory, from which a save in the background writes.

The memory has the layout of the file. The ends of the archives are written into it once, and each save copies the tensors
between them. So the writer has a few long pieces to write, and hardly needs the interpreter. The memory is used again by the
next save, because fresh pages cost several times what the copy costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.checkpoint.format.share import FileShare
from paceline.torch_internals.checkpoint import copy_all

_PIECE_BYTES = 16 << 20
_PAGE = 4096


class Staging:
    """Host memory for a share; pinned if some of it comes from an accelerator, so that it copies by itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._share: FileShare | None = None
        self._views: list[Tensor] = []

    def copy(self, share: FileShare, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors of a share; they may change as soon as this returns."""
        with torch.inference_mode(False), torch.no_grad():
            if share is not self._share:
                self._lay_out(share, on_accelerator=any(not tensor.is_cpu for tensor in tensors))
            views: list[Tensor] = []
            sources: list[Tensor] = []
            for view, tensor in zip(self._views, tensors, strict=True):
                if view.numel():
                    views.append(view)
                    sources.append(tensor)
            # Copies into pinned memory only join the queue of the device. All of them run one after the other, and are
            # waited for once.
            if views:
                copy_all(views, sources, non_blocking=self._memory.is_pinned())
            if self._memory.is_pinned():
                torch.accelerator.synchronize()

    def pieces(self) -> Iterator[Any]:
        """The file, piece by piece."""
        assert self._share is not None, "nothing was copied"
        data = memoryview(cast(Any, self._memory.numpy()))
        for start in range(0, self._share.bytes, _PIECE_BYTES):
            yield data[start : min(start + _PIECE_BYTES, self._share.bytes)]

    def _lay_out(self, share: FileShare, on_accelerator: bool) -> None:
        self._share = None
        self._views = []
        if self._memory.numel() < share.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # lets go of the old before it takes the new
            memory = torch.empty(share.bytes + _PAGE, dtype=torch.uint8, pin_memory=on_accelerator)
            self._memory = memory[-memory.data_ptr() % _PAGE :][: share.bytes]  # the disk takes whole pages from it
        data = memoryview(cast(Any, self._memory.numpy()))
        end = 0
        for place in share.places:
            data[end : place.start] = bytes(place.start - end)
            data[place.start : place.data] = place.envelope.head
            end = place.start + place.length
            data[place.data + place.bytes : end] = place.envelope.tail
            if place.bytes:
                part = self._memory[place.data : place.data + place.bytes]
                self._views.append(part.view(place.dtype).view(place.shape))
            else:  # of a rank that holds nothing of a tensor: there is no place that such a view could begin at
                self._views.append(torch.empty(place.shape, dtype=place.dtype))
        self._share = share
