"""Tensors and rows in few bytes, such that two runs can be compared without either keeping a tensor.

sketch    SIZE sums of elements with random signs (a "count sketch": Charikar, Chen, Farach-Colton 2002). It is linear, and
          the norm of the difference of two sketches estimates the norm of the difference of the tensors. A tensor of at
          most SIZE elements is kept whole.
digest    a hash of a row's bytes: tells whether two rows are the same sample, augmented in the same way
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from paceline.torch_internals.dispatch import without_modes
from paceline.world.sharded import whole
from paceline.world.tree import tensors

SIZE = 32
_CHUNK = 1 << 16  # elements that are looked at at once; the signs repeat from there on
_DIGEST_BYTES = 6


def sketch(tensor: Tensor) -> list[float]:
    """Returns the sketch of a tensor, gathered first where it is divided. Ranks: all that hold a part."""
    flat = whole(tensor.detach()).reshape(-1)
    if flat.is_sparse:
        flat = flat.to_dense()
    if flat.numel() <= SIZE:
        return [float(value) for value in flat.to(torch.float64).cpu().tolist()]
    total = torch.zeros(SIZE, dtype=torch.float64)
    signs = _signs()
    for chunk in flat.split(_CHUNK):
        signed = chunk.to("cpu", torch.float64) * signs[: len(chunk)]
        missing = -len(signed) % SIZE
        if missing:
            signed = torch.nn.functional.pad(signed, (0, missing))
        total += signed.reshape(-1, SIZE).sum(0)
    return [float(value) for value in total.tolist()]


@cache
def _signs() -> Tensor:
    generator = torch.Generator().manual_seed(1729)
    return torch.randint(0, 2, (_CHUNK,), generator=generator).to(torch.float64) * 2 - 1


def rows(tree: object) -> list[str]:
    """A digest of each row (entry along dim 0) of the tensors in a batch; [] where there are no rows."""
    parts = [part.detach() for part in tensors(tree) if part.dim() > 0]
    if not parts:
        return []
    count = len(parts[0])
    hashes = [hashlib.blake2b(digest_size=_DIGEST_BYTES) for _ in range(count)]
    for part in parts:
        if len(part) != count:
            continue
        for row, content in zip(whole(part).cpu().contiguous(), hashes, strict=True):
            content.update(_bytes(row))
    return [content.hexdigest() for content in hashes]


def digest(content: bytes) -> str:
    """A hash of bytes."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    with without_modes():
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
