"""The shards of a model in files, one for each unit of FSDP2: a pass reads them unit by unit, a step writes them.

    gather unit 0 | compute unit 0 | gather unit 1 | compute unit 1        FSDP2
    read unit 1                    | read unit 2                           the system, which was asked to
                                   | give back unit 0                      its pages leave memory; its gathered form computes

Shards are tensors in memory that is a file (`TensorFile`), so that everything else finds them where they are: optimizers,
checkpoints, `state_dict`. A page that is not in memory is read when it is used. So what is read ahead and given back here
decides how long a pass takes and how much memory it needs, and never a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from paceline.parallel.divided_parameters import groups
from paceline.torch_internals.fsdp import call_before_gathering, group_parameters, sharded_parameter
from paceline_large.offload.mapped_file import TensorFile, disk_error, rounded
from paceline_large.torch_internals.shards import move_shard, shard_memory

if TYPE_CHECKING:
    from paceline.torch_internals.fsdp import FSDPParam


class ParametersOnDisk:
    """Keeps the shards of one model in files.

    Args:
        model: the root, after `fully_shard`.
        folder: where the files are made.
        keep: called with each shard. It is for rehearsals, which have no files: then `folder` is None.

    Raises:
        TrainError: `offload-disk`, if the disk has no room for them.
    """

    def __init__(self, model: nn.Module, folder: Path | None, keep: Callable[[Tensor], object]) -> None:
        self._name = type(model).__name__
        self._folder = folder
        self._keep = keep
        self._units: list[_UnitOnDisk] = []
        # The two units that were gathered last, and which unit came next after each two. The backward pass has another order.
        self._last: tuple[_UnitOnDisk | None, _UnitOnDisk | None] = None, None
        self._following: dict[tuple[_UnitOnDisk | None, _UnitOnDisk | None], _UnitOnDisk] = {}
        for group in groups(model):
            # A shard that is made of other tensors, as torchao's weights are, stays in memory.
            own = [each for each in group_parameters(group) if not hasattr(shard_memory(each), "__tensor_flatten__")]
            unit = _UnitOnDisk(own)
            self._units.append(unit)
            call_before_gathering(group, partial(self._before_gathering, unit))
        self.take_up()

    def take_up(self) -> None:
        """Moves shards to their files that are not there, as those of a model that has only now got its values."""
        for unit in self._units:
            self._take_up(unit)

    def files_of(self, parameters: Set[Tensor]) -> list[TensorFile]:
        """Returns the files in which some of these parameters are, as far as they are of this model."""
        return [unit.file for unit in self._units if unit.file is not None and unit.holds_one_of(parameters)]

    def _take_up(self, unit: _UnitOnDisk) -> None:
        if self._folder is None:
            unit.show(self._keep)
            return
        try:
            unit.take_up(self._folder)
        except OSError as error:
            raise disk_error(str(self._folder), error, f"parameters of {self._name} cannot be kept") from None

    def _before_gathering(self, unit: _UnitOnDisk) -> None:
        """Called before a unit is gathered, when FSDP2 has taken what it needs of the one before."""
        self._take_up(unit)
        before, last = self._last
        if last is not unit and last is not None and last.file is not None:
            last.file.give_back()
        self._following[before, last] = unit
        self._last = last, unit
        following = self._following.get(self._last)
        if following is not None and following.file is not None:
            following.file.read()


class _UnitOnDisk:
    """The shards of one unit, and their file.

    Args:
        parameters: of the unit.

    Attributes:
        file: with memory for the shards; None until there are any.
    """

    def __init__(self, parameters: Sequence[FSDPParam]) -> None:
        self.file: TensorFile | None = None
        self._parameters = parameters
        self._memory: list[Tensor] = []  # in the file, one for each parameter

    def holds_one_of(self, parameters: Set[Tensor]) -> bool:
        """Returns whether one of these parameters is this unit's."""
        return any(sharded_parameter(own) in parameters for own in self._parameters)

    def show(self, keep: Callable[[Tensor], object]) -> None:
        """Calls `keep` with each shard."""
        for parameter in self._parameters:
            keep(shard_memory(parameter))

    def take_up(self, folder: Path) -> None:
        """Moves the shards that have values and are elsewhere.

        Raises:
            OSError: the disk has no room for the file, which is made for the dtypes that the shards have now.
        """
        shards = [shard_memory(parameter) for parameter in self._parameters]
        if [shard.dtype for shard in shards] != [memory.dtype for memory in self._memory]:
            self._reserve(folder, shards)
        moved = False
        for parameter, memory in zip(self._parameters, self._memory, strict=True):
            moved |= move_shard(parameter, memory)
        if moved and self.file is not None:
            self.file.write()

    def _reserve(self, folder: Path, shards: Sequence[Tensor]) -> None:
        sizes = [rounded(shard.nbytes) for shard in shards]
        self.file = TensorFile(folder, sum(sizes))
        self._memory = []
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            self._memory.append(self.file.tensor(start, shard))
            start += size
