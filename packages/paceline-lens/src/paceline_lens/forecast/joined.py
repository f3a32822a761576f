"""`JoinedBytes`: which bytes the operations between products still move if a compiler joins them into kernels. Pure counting.

    read      what no joined operation has just computed
    written   what is read by an operation that is not joined, by a later pass, or again after a sum over the whole tensor

A result that only joined operations read stays in registers. Sums over rows are joined with what follows. One over a whole
tensor, as for a scale of float8, ends a kernel: what it has read is written, and read once more by whoever needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

# Copies that FSDP2 makes around its messages, outside of what is compiled.
_APART = ("fsdp::", "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::_foreach")


class JoinedBytes:
    """Follows which storages are in registers."""

    def __init__(self) -> None:
        # The phase and the bytes of results that nobody has written yet. An entry leaves with its storage.
        self._unwritten: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[str, int]] = weakref.WeakKeyDictionary()

    def of_joined(
        self, name: str, phase: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], moved: int
    ) -> int:
        """Returns the bytes of an operation that is no product.

        Args:
            name: of the operation.
            phase: of the step.
            read, written: its tensors.
            moved: its bytes if nothing is joined.
        """
        read, written = list(read), list(written)
        # Compilers leave complex numbers to torch's own kernels.
        is_complex = any(tensor.is_complex() for tensor in (*read, *written))
        if is_complex or name.startswith(_APART) or phase == "optimizer":
            return moved + self.of_others(read)
        count = 0
        ends = max((tensor.numel() for tensor in written), default=0) <= 1
        for tensor in read:
            storage = tensor.untyped_storage()
            made_in, size = self._unwritten.get(storage, ("", 0))
            if not made_in:
                count += min(tensor.nbytes, storage.nbytes())
            elif made_in != phase:
                count += 2 * size
            elif ends:
                count += size
            else:
                continue
            self._unwritten.pop(storage, None)
        for tensor in written:
            storage = tensor.untyped_storage()
            self._unwritten[storage] = (phase, min(tensor.nbytes, storage.nbytes()))
        return count

    def of_others(self, read: Iterable[torch.Tensor]) -> int:
        """Returns the bytes that are written because an operation reads them which is not joined."""
        return sum(self._unwritten.pop(tensor.untyped_storage(), ("", 0))[1] for tensor in read)
