"""What ranks send each other in one operation, and what has arrived then. `exchange.py` sends it.

It is apart from the exchange, which only several processes need: one process has the bytes of all ranks in the same form.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORD = 8  # bytes of a number in a message


class Topic:
    """What the ranks must agree about.

    Args:
        op: the operation, as the user calls it.
        detail: structure, dtypes and shapes, as text for the error message.
    """

    __slots__ = ("detail", "fingerprint", "op")

    def __init__(self, op: str, detail: str = "") -> None:
        self.op = op
        self.detail = detail
        self.fingerprint = fingerprint_of(f"{op}\0{detail}".encode())


@dataclass(slots=True)
class RankPayload:
    """What one rank sent.

    Attributes:
        rows: dim-0 size of each leaf, -1 for a 0-dim one.
        cpu_bytes, device_bytes: how much data there is.
    """

    rows: Sequence[int]
    cpu_bytes: int
    device_bytes: int = 0

    def tell_rows(self, rows: Sequence[int]) -> None:
        """Sets the rows, which came after the head."""
        self.rows = rows


@dataclass(slots=True)
class ByteLayout:
    """Where the bytes of all ranks lie.

    Attributes:
        buffer: of dtype uint8.
        starts: where those of each rank begin, in rank order.
    """

    buffer: Tensor
    starts: Sequence[int]


@dataclass(slots=True)
class Arrived:
    """What all ranks sent, in rank order.

    Attributes:
        sent: one entry a rank.
        alike: whether all ranks sent data of the same sizes.
        cpu, device: where the data lies; None if no rank has any there, or if the ranks only said how much they have. If
            not `alike`, the data on the CPU lies in the message buffer, which the next exchange overwrites.
    """

    sent: Sequence[RankPayload]
    alike: bool
    cpu: ByteLayout | None = None
    device: ByteLayout | None = None

    def lies_at(self, place: ByteLayout) -> None:
        """Says where the data of all ranks on the CPU is now."""
        self.cpu = place

    def rows_of(self, number: int) -> list[int]:
        """Returns the rows of one leaf on each rank, -1 where it has no dims."""
        return [sent.rows[number] for sent in self.sent]

    def bytes_of(self, rank: int) -> Tensor:
        """Returns the bytes of one rank on the CPU, which must have arrived."""
        assert self.cpu is not None, "they were only announced"
        start = self.cpu.starts[rank]
        return self.cpu.buffer[start : start + self.sent[rank].cpu_bytes]


class RowCounts(NamedTuple):
    """The rows of one batch, for each rank.

    Attributes:
        real: how many are real samples. They stand first; the rest is filler.
        loaded: how many lie in the batch, filler included; 0 where only the rank itself knows, since it has filler alone.
    """

    real: Sequence[int]
    loaded: Sequence[int]

    @property
    def are_all_real(self) -> bool:
        """Whether no rank has filler."""
        return all(self.real) and tuple(self.real) == tuple(self.loaded)

    def are_those_of(self, rows: Sequence[int]) -> bool:
        """Returns whether a tensor or list with so many rows on each rank has a row for each one of the batch."""
        return all(not loaded or count == loaded for count, loaded in zip(rows, self.loaded, strict=True))

    def num_kept(self, rows: Sequence[int]) -> list[int]:
        """Returns how many rows of each rank to keep: of a batch the real ones, of others all if the rank has a real one."""
        if self.are_those_of(rows):
            return [min(count, num_real) for count, num_real in zip(rows, self.real, strict=True)]
        return [abs(count) if num_real else 0 for count, num_real in zip(rows, self.real, strict=True)]


# Returns the rows of the batch to which some tensors and lists belong; it gets the rows of each on each rank (-1: no dims).
CountsOf = Callable[[Sequence[Sequence[int]]], RowCounts]


def fingerprint_of(content: bytes) -> int:
    """Returns a hash of `content` that fits into a word of a message."""
    digest = hashlib.blake2b(content, digest_size=_WORD).digest()
    return int.from_bytes(digest, "little", signed=True)


def as_bytes(leaf: Tensor) -> Tensor:
    """Returns the bytes of a tensor, without a copy where it is contiguous.

    Shape:
        Any; gives [number of bytes], of dtype uint8.
    """
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    # A contiguous tensor may still have any stride in a dim of size 1, which `view(dtype)` refuses; hence `as_strided`.
    flat = leaf.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def unpickled(data: Tensor) -> Any:
    """Returns the object of which the bytes are a pickle."""
    # Unpickling runs code, but these bytes come from ranks of the same run, which run the same script.
    return pickle.loads(data.numpy().tobytes())
