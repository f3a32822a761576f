"""`LoopbackCollectives`: collective operations without other ranks, as if all ranks had the values of this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.world.arrived import CountsOf
from paceline.world.collectives import Collectives, Reduction
from paceline.world.mesh import Group
from paceline.world.tree import Tree, map_tensors
from paceline.world.world import World


class LoopbackCollectives(Collectives):
    """The operations of `Collectives`, as if every other rank had the values of this one, which is rank 0."""

    def __init__(self, world: World, *, device: torch.device, group: Group = None) -> None:
        # `Collectives` would make an exchange with the other ranks.
        self.world = world
        self.device = device
        self.debug = False
        self.group = group
        if group is None and world.size > 1:
            self.group = dist.group.WORLD
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0
        self._exchange = None
        self._reports = None
        self._has_told_failure = False
        self._last_sent: object = None

    def over(self, group: Group) -> Collectives:
        """Returns the operations among the ranks of `group`."""
        return self if group is None else LoopbackCollectives(self.world, device=self.device, group=group)

    def gather(self, tree: Tree) -> Tree:
        """Returns the tensors of this rank, repeated for each rank."""
        return map_tensors(lambda tensor: torch.cat([_with_rows(tensor)] * self.size), tree)

    def gather_rows(self, tree: Tree, counts_of: CountsOf, objects: bool = False) -> Tree:
        """Returns the first rows of this rank for each rank, as many as that rank has real ones."""
        if objects:
            return list(tree) * self.size

        def real_rows(tensor: torch.Tensor) -> torch.Tensor:
            own = [len(tensor) if tensor.dim() else -1] * self.size
            return torch.cat([_with_rows(tensor)[:count] for count in counts_of([own]).num_kept(own)])

        return map_tensors(real_rows, tree)

    def reduce(self, tree: Tree, reduction: Reduction = "sum", scale: float = 1.0) -> Tree:
        """Returns a copy of this rank's tensors: a mean over equal values, which also stands for their sum."""

        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            return tensor * scale if tensor.is_floating_point() else tensor.clone()

        return map_tensors(scaled, tree)

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """Returns a copy of this rank's tensors."""
        return map_tensors(lambda tensor: tensor.detach().clone(), tree)

    def pad_across(self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Returns this rank's tensors unchanged, since those of the others are as long."""
        return tree

    def gather_object(self, obj: Any) -> list[Any]:
        """Returns the object, repeated for each rank."""
        return [obj] * self.size

    def collect_object(self, obj: Any) -> list[Any]:
        """Returns the object, repeated for each rank: this rank is rank 0, which gets them."""
        return [obj] * self.size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns the object. If another rank sends, it returns what this rank sent last.

        In a pipeline that is the description of this rank's own stage, which then stands for every stage.
        """
        if obj is None and src != self.rank:
            return self._last_sent
        self._last_sent = obj
        return obj

    def combine(self, op: str, detail: str, numbers: Sequence[int], combination: Literal["sum", "max"]) -> list[int]:
        """Returns what flags, counts and barriers are made of, as if every rank had these numbers."""
        return [number * self.size if combination == "sum" else number for number in numbers]

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums, as if every rank had these numbers."""
        return [number * self.size for number in numbers]


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without its gradient; a tensor without dimensions becomes one row."""
    return tensor.detach().reshape(tensor.shape or (1,))
