"""Which rank stands where on which axis, as DeepSpeed's scripts ask it: pure arithmetic on names of axes.

ProcessTopology(axes, dims)      ranks counted row by row, the last axis fastest
PipeDataParallelTopology         pipe, data           our layout's pp, then replicate x shard
PipeModelDataParallelTopology    pipe, data, model    and tp
PipelineParallelGrid             the same, as seen from this rank
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from paceline.base.errors import PlanError
from paceline.world.world import World


class ProcessTopology:
    """Sizes of named axes, and the ranks on them.

    Args:
        axes: names, the slowest first.
        dims: ranks along each.

    Attributes:
        axes, dims: as given.
        mapping: coordinate -> rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        are_distinct = len(set(axes)) == len(axes)
        if len(axes) != len(dims) or not are_distinct or any(dim < 1 for dim in dims):
            raise PlanError(
                "pipe-topology",
                "a topology needs one size of at least 1 for each of its axes.",
                why=f"axes={list(axes)}, dims={list(dims)}",
                fix="give as many dims as axes, as in ProcessTopology(axes=['pipe', 'data'], dims=[2, 4])",
            )
        self.axes = list(axes)
        self.dims = list(dims)
        # A namedtuple whose fields are known only now, of which type checkers can make nothing.
        make_class: Any = namedtuple
        self.ProcessCoord = make_class("ProcessCoord", self.axes)
        self.mapping: dict[Any, int] = {}
        # `product` counts its last range fastest, as ranks are.
        for rank, coordinate in enumerate(product(*map(range, self.dims))):
            self.mapping[self.ProcessCoord(*coordinate)] = rank

    def get_rank(self, **coordinate: int) -> int:
        """Returns the rank at a whole coordinate."""
        if sorted(coordinate) != sorted(self.axes):
            raise ValueError(f"get_rank() does not support slices: give each of {self.axes}, not {sorted(coordinate)}")
        return self.mapping[self.ProcessCoord(**coordinate)]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Counts the ranks along an axis; 0 for an axis that there is not."""
        if axis not in self.axes:
            return 0
        return self.dims[self.axes.index(axis)]

    def get_coord(self, rank: int) -> Any:
        """Returns the coordinate of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        for coordinate, at_rank in self.mapping.items():
            if at_rank == rank:
                return coordinate
        raise ValueError(f"there is no rank {rank} in a topology of {len(self.mapping)} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists the groups of ranks that differ along one axis alone."""
        if axis not in self.axes:
            return []
        # A group for each place on the other axes.
        other_axes = [other for other in self.axes if other != axis]
        other_dims = [self.get_dim(other) for other in other_axes]
        groups = []
        for places in product(*map(range, other_dims)):
            wanted = dict(zip(other_axes, places, strict=True))
            groups.append(self.filter_match(**wanted))
        return groups

    def filter_match(self, **wanted: int) -> list[int]:
        """Lists the ranks whose coordinates are as wanted, ascending."""
        ranks = []
        for coordinate, rank in self.mapping.items():
            if all(getattr(coordinate, axis) == place for axis, place in wanted.items()):
                ranks.append(rank)
        return ranks

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self.filter_match(**{axis: idx})

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Writes a rank's coordinate as text, such as "pipe_00-model_01"."""
        coordinate = self.get_coord(rank)
        parts = []
        for axis in self.axes:
            if axis not in omit_axes:
                parts.append(f"{axis}{inner_sep}{getattr(coordinate, axis):02d}")
        return outer_sep.join(parts)

    def world_size(self) -> int:
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and replicas of each, which are neighbours in rank."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, replicas of each, and the parts of each replica's layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """A topology as seen from this rank.

    Args:
        topology: axes pipe and data, and perhaps model; None takes two axes from the number of stages.
        process_group: is not used: groups are made where the plan is applied.
        num_stages: where no topology is given.

    Attributes:
        global_rank, world_size: of this process, and how many there are.
        stage_id, data_parallel_id: where this process stands.
        pipe_parallel_size, data_parallel_size, model_parallel_size: ranks along each axis.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: object = None, num_stages: int = 1
    ) -> None:
        world = World.detect()
        self.global_rank = world.rank
        self.world_size = world.size
        self._topo = topology or PipeDataParallelTopology(num_stages, world.size // num_stages)
        coordinate = self._topo.get_coord(world.rank)
        self.pipe_parallel_size = max(1, self._topo.get_dim("pipe"))
        self.data_parallel_size = max(1, self._topo.get_dim("data"))
        self.model_parallel_size = self.slice_parallel_size = max(1, self._topo.get_dim("model"))
        # A topology may lack an axis.
        self.stage_id = getattr(coordinate, "pipe", 0)
        self.data_parallel_id = getattr(coordinate, "data", 0)
        self._model_id = getattr(coordinate, "model", 0)

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_model_parallel_rank(self) -> int:
        return self._model_id

    def get_model_parallel_world_size(self) -> int:
        return self.model_parallel_size

    def get_global_rank(self) -> int:
        return self.global_rank

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """Returns the rank that stands where this one does, but in another stage."""
        coordinate = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **others)
        return self._topo.mapping[coordinate]

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.pipe_parallel_size - 1

    # Other names of the same, which Megatron's scripts ask a model-parallel unit for.
    get_pipe_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
