"""A file whose bytes are the memory of tensors, so that these are ordinary tensors for everything else.

Such a file has no name: nothing is left behind, however the run ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from pathlib import Path

import torch
from torch import Tensor

from paceline.base.errors import TrainError

_ALIGNMENT = 64  # bytes, as torch's own memory has it
_PROBE_BYTES = 16 << 20


class TensorFile:
    """A file without a name, mapped into memory.

    Args:
        folder: on the disk.
        num_bytes: they are reserved on the disk, so that it cannot be full later.

    Raises:
        OSError: the disk has no room for it.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        os.unlink(name)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, num_bytes)
        else:
            os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    def tensor(self, start: int, like: Tensor) -> Tensor:
        """Returns the values from byte `start` on, as a tensor of the dtype, shape and order in memory of `like`.

        Each tensor has a storage of its own, by which tied parameters are told from others.
        """
        # A buffer has one byte at least, and a tensor may have no elements.
        memory = torch.frombuffer(self._map, dtype=torch.uint8, count=max(1, like.nbytes), offset=start)
        flat = memory[: like.nbytes].view(like.dtype)
        if like.is_contiguous():
            return flat.view(like.shape)
        return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())

    def read(self) -> None:
        """Asks the system to read the file into its memory, from which the mapping takes it; elsewhere it is read when used."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, self.num_bytes, os.POSIX_FADV_WILLNEED)

    def write(self) -> None:
        """Writes what was changed to the disk, and gives its memory back."""
        os.fdatasync(self._descriptor)
        self.give_back()

    def give_back(self) -> None:
        """Gives the memory back to the system, except for what was changed and not written: that is still read from it."""
        if hasattr(mmap, "MADV_DONTNEED"):  # of a mapped file: its pages are read again when they are used
            self._map.madvise(mmap.MADV_DONTNEED)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, self.num_bytes, os.POSIX_FADV_DONTNEED)


def written_per_second(folder: Path) -> float:
    """Makes the folder and measures how many bytes a second can be written there.

    Raises:
        OSError: it cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = TensorFile(folder, _PROBE_BYTES)
    file.tensor(0, torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="meta")).fill_(1)
    began = time.monotonic()
    file.write()
    return _PROBE_BYTES / (time.monotonic() - began)


def disk_error(folder: str, error: OSError, what: str) -> TrainError:
    """Returns the error about a folder in which states or parameters cannot be kept.

    Args:
        folder: as the user wrote it.
        error: of the system.
        what: what cannot be done there.
    """
    return TrainError(
        "offload-disk",
        f"{what} in {folder}: {os.strerror(error.errno or 0).lower()}.",
        why=f"offload says disk:{folder}; what is in no file is in memory, and nothing is lost",
        fix="save a checkpoint to another disk, and start again with room for it, or with a folder on another disk",
    )


def rounded(num_bytes: int) -> int:
    """Returns how many bytes a tensor takes in a file, in which each begins at a multiple of the alignment."""
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
