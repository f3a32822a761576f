"""A share says which tensors one rank writes, and at which offset of its file each of them is.

A shard file is a sequence of small archives of `torch.save`, one for each tensor. Such an archive is a head, the tensor's
bytes and a tail, and both ends are the same for all tensors of one dtype and shape. So they are made once, every offset is
known before anything is written, and neither writing nor reading calls torch for each tensor. Thousands of small parameters
then cost no more than a few large ones.

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
_JOIN_BYTES = 1 << 20  # smaller tensors are joined, so that no system call writes only a few bytes


@dataclass(frozen=True)
class Envelope:
    """The bytes that `torch.save` writes before and after those of a tensor."""

    head: bytes
    tail: bytes


class _OffsetRecorder:
    """A file that records everything except the bytes of one tensor, which it recognizes by their address."""

    def __init__(self, address: int) -> None:
        self.head = bytearray()
        self.tail = bytearray()
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
    """Returns the envelope of contiguous CPU tensors of a dtype and shape.

    The memory of a tensor is allocated but never touched, so that this is cheap however large the tensor is.
    """
    tensor = torch.empty(shape, dtype=dtype)
    recorder = _OffsetRecorder(tensor.data_ptr())
    # The archive's own checksum would be that of this uninitialized memory. torch never compares it, and the manifest has a
    # checksum of the whole file.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, cast(Any, recorder))
    finally:
        set_crc32_options(before)
    return Envelope(bytes(recorder.head), bytes(recorder.tail))


@dataclass(frozen=True)
class ByteRange:
    """The place of one tensor, or of a part of it, in a file.

    Attributes:
        index: the name and the offsets of the part, as torch's index has them.
        start: the offset of its archive in the file.
        shape, dtype: the shape and dtype of the part.
        envelope: the bytes around it.
        bytes: the number of bytes of the part itself.
    """

    index: MetadataIndex
    start: int
    shape: torch.Size
    dtype: torch.dtype
    envelope: Envelope
    bytes: int

    @property
    def data(self) -> int:
        """The offset of its own bytes in the file."""
        return self.start + len(self.envelope.head)

    @property
    def length(self) -> int:
        """The number of bytes of the archive."""
        return len(self.envelope.head) + self.bytes + len(self.envelope.tail)


@dataclass(frozen=True)
class FileShare:
    """The contents of the file that one rank writes.

    Attributes:
        places: the places of its tensors, in order.
        bytes: the size of the file.
    """

    places: list[ByteRange] = field(default_factory=list)
    bytes: int = 0

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> FileShare:
        """Makes the share of a plan's items; the result is the same on every rank."""
        places: list[ByteRange] = []
        end = 0
        for item in items:
            data = item.tensor_data
            assert data is not None, "tensors alone are planned"
            shape = data.chunk.sizes
            dtype = data.properties.dtype
            start = -(-end // _ALIGN) * _ALIGN  # rounded up
            around = envelope(dtype, tuple(shape))
            place = ByteRange(item.index, start, shape, dtype, around, shape.numel() * dtype.itemsize)
            places.append(place)
            end = start + place.length
        return cls(places, end)

    def results(self, name: str) -> list[WriteResult]:
        """Returns the place of each tensor in the file `name`, for torch's index."""
        return [
            WriteResult(place.index, place.length, storage_info(name, place.start, place.length))
            for place in self.places
        ]

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        """Yields the contents of the file in pieces that share the tensors' memory; from an accelerator, one copy at a time."""
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
    """Returns the bytes of a tensor, in the order of its elements; without a copy if it is contiguous in CPU memory."""
    # A conjugate or negative view shares its memory with a tensor of other values.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return memoryview(b"")
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
