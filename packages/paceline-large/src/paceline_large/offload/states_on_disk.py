"""States of one optimizer in files: each step runs part by part, and reads and writes files beside the kernels.

    read part 0 | step part 0 | step part 1 | step part 2 ...       the main thread
                | read part 1 | read part 2 |                       a thread that reads
                              | write part 0 | write part 1         a thread that writes

The files are mapped into memory, so that states are ordinary tensors for everything else: hooks, `state_dict`, checkpoints.
States that were loaded are in memory until the next step. After a part was written, its pages are given back to the system.
Parameters that are on disk, too, are read and written with the states of their part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from paceline.parallel.stand_ins import original
from paceline_large.offload.mapped_file import TensorFile, disk_error, rounded
from paceline_large.offload.parameters_on_disk import ParametersOnDisk


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
        self._models: list[ParametersOnDisk] = []
        self._files: dict[int, TensorFile] = {}  # by the number of the part
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}
        self._failure: OSError | None = None
        self._expected = 0

    def expect(self, num_bytes: int) -> None:
        """Says how many bytes of states the first step makes for the parameters of one more model."""
        self._expected += num_bytes

    @property
    def num_bytes_to_come(self) -> int:
        """The bytes that are expected and for which no file was made."""
        return max(0, self._expected - sum(file.num_bytes for file in self._files.values()))

    def step_with(self, parameters: ParametersOnDisk) -> None:
        """Lets the parameters of a model be read and written with their states."""
        if parameters not in self._models:
            self._models.append(parameters)

    def __call__(self, optimizer: Optimizer) -> Sequence[AbstractContextManager[None]]:
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
        self._begin_read(parts[number])
        self._reads.pop(number).result()
        if number + 1 < len(parts):
            self._begin_read(parts[number + 1])
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
        self._writes[number] = self._writer.submit(_write, self._files_of(parts[number]))
        if number + 1 == len(parts):
            self._reader.shutdown(wait=False)
            self._writer.shutdown(wait=False)

    def _begin_read(self, part: _StatePart) -> None:
        if part.number in self._reads:
            return
        # What is still written is in memory: it is not read before that has ended.
        written = self._writes.pop(part.number, None)
        self._reads[part.number] = self._reader.submit(self._read, self._files_of(part), written)

    def _files_of(self, part: _StatePart) -> list[TensorFile]:
        """Returns the files of a part: that of its states, and those in which its parameters are."""
        files = [self._files[part.number]] if part.number in self._files else []
        parameters = {original(parameter) for _, members in part.members for parameter in members}
        for model in self._models:
            files += model.files_of(parameters)
        return files

    def _read(self, files: list[TensorFile], written: Future[None] | None) -> None:
        if written is not None:
            try:
                written.result()
            except OSError as error:
                self._failure = error
        for file in files:
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
        sizes = [rounded(value.nbytes) for _, _, value in places]
        file = self._files.get(part.number)
        try:
            if file is None or file.num_bytes != sum(sizes):
                file = TensorFile(self._folder, sum(sizes))
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


def _write(files: list[TensorFile]) -> None:
    for file in files:
        file.write()


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
