"""States of one optimizer in files: each step runs part by part, and reads and writes files beside the kernels.

    read part 0 | step part 0 | step part 1 | step part 2 ...       the main thread
                | read part 1 | read part 2 |                       a thread that reads
                              | write part 0 | write part 1         a thread that writes

The files are mapped into memory, so that states are ordinary tensors for everything else: hooks, `state_dict`, checkpoints.
States that were loaded are in memory until the next step. After a part was written, its pages are given back to the system. The
files have no names: nothing is left behind, however the run ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.parallel.stand_ins import original

_ALIGNMENT = 64  # bytes, as torch's own memory has it
_PROBE_BYTES = 16 << 20


class _StatePart(NamedTuple):
    """Parameters that are stepped together.

    Attributes:
        number: from 0.
        members: for each group that has some of them, its number and these parameters.
    """

    number: int
    members: list[tuple[int, list[Tensor]]]


class StatesOnDisk:
    """Keeps the states of one optimizer in files.

    Args:
        folder: where the files are made.
        part_bytes: how many bytes of parameters are stepped together. About three times their states are in memory.
        keep: called with each tensor of a state. It is for rehearsals, which have no files: then `folder` is None.
    """

    def __init__(self, folder: Path | None, part_bytes: int, keep: Callable[[Tensor], object]) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._keep = keep
        self._files: dict[int, _StateFile] = {}  # by the number of the part
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}
        self._failure: OSError | None = None

    def parts(self, optimizer: Optimizer) -> Sequence[AbstractContextManager[None]]:
        """Returns a context for each part of a step; see `OptimizerAdapter.step_in_parts`."""
        parts = _parts(optimizer, self._part_bytes)
        # Their threads end with the step, or when all is written.
        self._reader = ThreadPoolExecutor(1, "paceline-read-states")
        self._writer = ThreadPoolExecutor(1, "paceline-write-states")
        return [self._stepping(optimizer, parts, number) for number in range(len(parts))]

    def refuse_lost_disk(self, optimizer: Optimizer) -> None:
        """Called after a step.

        Raises:
            TrainError: `offload-disk`, if a file could not be made or written. The step is complete: states are in memory.
        """
        failure = self._failure
        self._failure = None
        if failure is None:
            return
        what = f"{type(optimizer).__name__} has taken its step, but not all of its states can be kept"
        raise disk_error(str(self._folder), failure, what)

    @contextmanager
    def _stepping(self, optimizer: Optimizer, parts: list[_StatePart], number: int) -> Iterator[None]:
        self._begin_read(number)
        self._reads.pop(number).result()
        if number + 1 < len(parts):
            self._begin_read(number + 1)
        groups = optimizer.param_groups
        before = [group["params"] for group in groups]
        for index, members in parts[number].members:
            groups[index]["params"] = members
        optimizer.param_groups = [groups[index] for index, _ in parts[number].members]
        try:
            yield
        finally:
            optimizer.param_groups = groups
            for group, members in zip(groups, before, strict=True):
                group["params"] = members
        self._store(optimizer, parts[number])
        if number + 1 == len(parts):
            self._reader.shutdown(wait=False)
            self._writer.shutdown(wait=False)

    def _begin_read(self, number: int) -> None:
        if number in self._reads:
            return
        file = self._files.get(number)
        # What is still written is in memory: it is not read before that has ended.
        written = self._writes.pop(number, None)
        self._reads[number] = self._reader.submit(self._read, file, written)

    def _read(self, file: _StateFile | None, written: Future[None] | None) -> None:
        if written is not None:
            try:
                written.result()
            except OSError as error:
                self._failure = error
        if file is not None:
            file.read()

    def _store(self, optimizer: Optimizer, part: _StatePart) -> None:
        """Moves the states of a part to its file, which is made for them, and begins to write it."""
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        for _, members in part.members:
            for parameter in members:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        places.append((state, key, value))
        if not places:
            return
        if self._folder is None:
            for _, _, value in places:
                self._keep(value)
            return
        sizes = [_rounded(value.nbytes) for _, _, value in places]
        file = self._files.get(part.number)
        try:
            if file is None or file.num_bytes != sum(sizes):
                file = _StateFile(self._folder, sum(sizes))
        except OSError as error:  # the states stay in memory, so nothing is lost
            self._failure = error
            return
        self._files[part.number] = file
        start = 0
        for (state, key, value), size in zip(places, sizes, strict=True):
            place = file.tensor(start, value)
            if place.data_ptr() != value.data_ptr():
                state[key] = place.copy_(value)
            start += size
        self._writes[part.number] = self._writer.submit(file.write)


class _StateFile:
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
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, start: int, like: Tensor) -> Tensor:
        """Returns the values from byte `start` on, as a tensor of the dtype, shape and order in memory of `like`."""
        flat = self._memory[start : start + like.nbytes].view(like.dtype)
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
    file = _StateFile(folder, _PROBE_BYTES)
    file.tensor(0, torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="meta")).fill_(1)
    began = time.monotonic()
    file.write()
    return _PROBE_BYTES / (time.monotonic() - began)


def disk_error(folder: str, error: OSError, what: str) -> TrainError:
    """Returns the error about a folder in which states cannot be kept.

    Args:
        folder: as the user wrote it.
        error: of the system.
        what: what cannot be done there.
    """
    return TrainError(
        "offload-disk",
        f"{what} in {folder}: {os.strerror(error.errno or 0).lower()}.",
        why=f"offload says optimizer=disk:{folder}; states that are in no file are in memory, and none is lost",
        fix="save a checkpoint to another disk, and start again with room for the states, or with a folder on another disk",
    )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _parts(optimizer: Optimizer, part_bytes: int) -> list[_StatePart]:
    """Divides the parameters, in the order of the groups, by their bytes. Each step divides them in the same way."""
    parts = [_StatePart(0, [])]
    filled = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            num_bytes = original(parameter).nbytes
            if filled and filled + num_bytes > part_bytes:
                parts.append(_StatePart(len(parts), []))
                filled = 0
            members = parts[-1].members
            if not members or members[-1][0] != index:
                members.append((index, []))
            members[-1][1].append(parameter)
            filled += num_bytes
    return parts
