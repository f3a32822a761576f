"""A share: which tensors one rank writes, and where each of them lies in its file.

A shard file is a row of small archives of `torch.save`, one a tensor. Such an archive is a head, the tensor's bytes and a
tail, and both ends are the same for all tensors of one dtype and shape. So they are made once, every offset is known
before anything is written, and neither writing nor reading calls torch for each tensor: thousands of small parameters
cost what a few large ones do.

    | head | bytes ... | tail | gap | head | bytes ... | tail | gap |      each archive begins at a multiple of 64
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from paceline.torch_internals.checkpoint import storage_info

_ALIGN = 64
_JOIN_BYTES = 1 << 20  # what is smaller is collected, so that no call of the system writes a few bytes


@dataclass(frozen=True)
class Envelope:
    """What `torch.save` writes before and after the bytes of a tensor."""

    head: bytes
    tail: bytes


class _Recorder:
    """A file that keeps all but one tensor's bytes, which it knows by their address."""

    def __init__(self, address: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._address = address
        self._end = self.head

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) and numpy.frombuffer(view, numpy.uint8).ctypes.data == self._address:
            self._end = self.tail
        else:
            self._end += view
        return len(view)

    def flush(self) -> None: ...


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """The envelope of contiguous CPU tensors. Their memory is never touched, however large they are."""
    tensor = torch.empty(shape, dtype=dtype)
    recorder = _Recorder(tensor.data_ptr())
    # The archive's own checksum would be of bytes that are not the tensor's; torch never compares it, and the manifest
    # has one of the whole file.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, cast(Any, recorder))
    finally:
        set_crc32_options(before)
    return Envelope(bytes(recorder.head), bytes(recorder.tail))


@dataclass(frozen=True)
class Place:
    """Where one tensor, or a part of it, lies.

    Attributes:
        index: which.
        start: where its archive begins.
        shape, dtype: of the part.
        envelope: what stands around it.
        bytes: its own.
    """

    index: MetadataIndex
    start: int
    shape: torch.Size
    dtype: torch.dtype
    envelope: Envelope
    bytes: int

    @property
    def data(self) -> int:
        """Where its own bytes begin."""
        return self.start + len(self.envelope.head)

    @property
    def length(self) -> int:
        """Bytes of the archive."""
        return len(self.envelope.head) + self.bytes + len(self.envelope.tail)


@dataclass(frozen=True)
class Share:
    """What one rank writes.

    Attributes:
        places: of its tensors, in order.
        bytes: of the file.
    """

    places: list[Place] = field(default_factory=list)
    bytes: int = 0

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> Share:
        """The share that a plan's items mean; the same on every rank."""
        places: list[Place] = []
        end = 0
        for item in items:
            data = item.tensor_data
            assert data is not None, "tensors alone are planned"
            shape, dtype = data.chunk.sizes, data.properties.dtype
            start = -(-end // _ALIGN) * _ALIGN
            around = envelope(dtype, tuple(shape))
            place = Place(item.index, start, shape, dtype, around, shape.numel() * dtype.itemsize)
            places.append(place)
            end = start + place.length
        return cls(places, end)

    def results(self, name: str) -> list[WriteResult]:
        """For torch's index: where each tensor lies in the file `name`."""
        return [
            WriteResult(place.index, place.length, storage_info(name, place.start, place.length))
            for place in self.places
        ]

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        """The file, piece by piece, straight from living tensors; one of them at a time is copied from an accelerator."""
        # Small tensors are joined to pieces of `_JOIN_BYTES`, since each piece is one call of the operating system.
        small = bytearray()
        end = 0
        for place, tensor in zip(self.places, tensors, strict=True):
            small += bytes(place.start - end) + place.envelope.head
            data = raw(tensor)
            if place.bytes < _JOIN_BYTES:
                small += data
            else:
                yield small
                yield data
                small = bytearray()
            small += place.envelope.tail
            end = place.start + place.length
            if len(small) >= _JOIN_BYTES:
                yield small
                small = bytearray()
        yield small


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its elements; without a copy where it lies so in CPU memory."""
    # A conjugate or negative view has the bytes of another tensor.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return memoryview(b"")
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
