"""Reads pages of mapped files ahead of their use, so that the thread which computes does not wait for the disk."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

from paceline_large.inference.libc import libc

# Linux 5.14 and later; `mmap` does not name it. It reads the pages and enters them in the page table.
_MADV_POPULATE_READ = 22
# Tensors of one block are next to each other in its file. A gap up to this size is read together with them.
_GAP = 1 << 16


class MappedPages:
    """The memory pages of some mapped tensors.

    Args:
        tensors: views of mapped files; the pages of other tensors are in memory anyway.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        ranges = []
        for tensor in tensors:
            # An empty tensor has no address.
            if tensor.nbytes:
                ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        runs: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            # `madvise` and `mincore` take addresses that begin a page.
            start -= start % mmap.PAGESIZE
            if runs and start - runs[-1][1] <= _GAP:
                runs[-1] = runs[-1][0], max(stop, runs[-1][1])
            else:
                runs.append((start, stop))
        self._runs = runs
        # `mincore` writes one byte a page into it.
        most_pages = max((_num_pages(stop - start) for start, stop in runs), default=0)
        self._answer = ctypes.create_string_buffer(max(most_pages, 1))
        self._read_before = False

    def resident(self) -> bool:
        """Returns whether all pages were in memory a moment ago; it takes 5 us for 40 MB.

        It is always False before the first `read`: for a file of another owner, Linux reports all pages as resident.
        """
        library = libc()
        if library is None:
            return True
        if not self._read_before:
            return False
        for start, stop in self._runs:
            # If the system cannot answer, the pages count as resident: reading ahead is only a help.
            if library.mincore(start, stop - start, self._answer) != 0:
                return True
            if b"\0" in self._answer.raw[: _num_pages(stop - start)]:
                return False
        return True

    def read(self) -> None:
        """Reads all pages; returns when they are in memory. Other threads run meanwhile."""
        library = libc()
        if library is None:
            return
        self._read_before = True
        for start, stop in self._runs:
            # The first call starts to read and returns. A kernel that does not know the second call returns an error, and the
            # pages are read when they are used.
            library.madvise(start, stop - start, mmap.MADV_WILLNEED)
            library.madvise(start, stop - start, _MADV_POPULATE_READ)


def _num_pages(nbytes: int) -> int:
    """Returns how many pages hold so many bytes, rounded up."""
    return -(-nbytes // mmap.PAGESIZE)
