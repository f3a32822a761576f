"""`Echo`: collective operations in a rehearsal, where there is nobody to talk to: every rank answers what this one said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.world.collectives import Collectives
from paceline.world.tree import map_tensors
from paceline.world.world import World


class Echo(Collectives):
    """The operations of `Collectives`, each answered with this rank's own values in everybody's place."""

    def __init__(self, world: World, *, device: torch.device, group: Any = None, **_: Any) -> None:
        self.world, self.device, self.debug = world, device, False
        self.group = group if group is not None or world.size == 1 else dist.group.WORLD
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0
        self._exchange = None
        self._said: Any = None

    def over(self, group: Any) -> Collectives:
        """The same among the ranks of `group`."""
        return self if group is None else Echo(self.world, device=self.device, group=group)

    def gather(self, tree: Any) -> Any:
        """What this rank has, once for each rank."""
        return map_tensors(lambda t: torch.cat([t.detach().reshape(t.shape or (1,))] * self.size), tree)

    def gather_rows(self, tree: Any, real: Sequence[int], local: int, objects: bool = False) -> Any:
        """The same, with as many rows as all ranks have real ones."""
        if objects:
            return list(tree) * self.size

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.detach().reshape(tensor.shape or (1,))
            whole = tensor.dim() > 0 and len(tensor) == local
            return torch.cat([own[:count] if whole else own for count in real])

        return map_tensors(rows, tree)

    def reduce(self, tree: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """A copy of this rank's tensors."""
        return map_tensors(lambda t: t.detach() * scale if t.is_floating_point() else t.detach().clone(), tree)

    def broadcast(self, tree: Any, src: int = 0) -> Any:
        """A copy of this rank's tensors."""
        return map_tensors(lambda t: t.detach().clone(), tree)

    def pad_across(self, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """This rank's tensors: the others are as long."""
        return tree

    def gather_object(self, obj: Any) -> list[Any]:
        """The object, once for each rank."""
        return [obj] * self.size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object; where this rank only listens, what it said last (to a pipeline: its own stage, as every stage)."""
        if obj is None and src != self.rank:
            return self._said
        self._said = obj
        return obj

    def barrier(self) -> None:
        """Everybody is here."""

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag

    def sum_ints(self, numbers: Sequence[int]) -> list[int]:
        """As if every rank had these numbers."""
        return [number * self.size for number in numbers]

    def check(self, op: str, detail: str = "") -> None:
        """Everybody agrees."""
