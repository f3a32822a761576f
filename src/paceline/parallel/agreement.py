"""`Agreement`: ranks tell each other what they are about to send, so that none takes one unit's numbers for another's.

    gather    "the parameters of blocks.2"                          with the parameters themselves: no time is lost
    reduce    "the gradients of blocks.2, of which I have these"    before; who lacks some sends zeros
    end       "my backward pass is over"

FSDP2 itself pairs whatever comes next: on ranks that compute different blocks a rank would use another block's
parameters without a word, abort, or wait for ever. Where the backend is not gloo nobody checks: it would cost a round
trip of the host for each unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import PlanError
from paceline.world.mesh import unit_name
from paceline.world.works import wait_all

GATHER, REDUCE, END = range(3)
_DOES = ("gathers the parameters of {}", "reduces the gradients of {}", "has ended the backward pass of {}")
_TAG = 1 << 20  # of what is said; further tags are those of flags


class Statement:
    """What one rank said, and what it will hear.

    Args:
        group: all say something, as often.
        kind: what this rank is about to do: `GATHER`, `REDUCE` or `END`.
        unit: the number of the unit with which it does so, from `register_unit`.
        flags: small numbers that are the rank's own; as many on all ranks that say the same.
    """

    def __init__(self, group: Any, kind: int, unit: int, flags: Sequence[int] | None = None) -> None:
        self._group = group
        self._said = (kind, unit)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._peers = [(rank + step) % ranks for step in range(1, ranks)]
        self._own = list(flags or ())
        self._heard = {peer: torch.empty(2, dtype=torch.int64) for peer in self._peers}
        self._flags = {peer: torch.empty(len(self._own), dtype=torch.uint8) for peer in self._peers}
        self._works = self._exchange(torch.tensor(self._said), self._heard, _TAG)
        if self._own:
            own = torch.tensor(self._own, dtype=torch.uint8)
            self._later = self._exchange(own, self._flags, _TAG + 1 + unit)

    def _exchange(self, own: torch.Tensor, places: dict[int, torch.Tensor], tag: int) -> list[Any]:
        works = [dist.irecv(places[peer], group=self._group, tag=tag, group_src=peer) for peer in self._peers]
        return works + [dist.isend(own, group=self._group, tag=tag, group_dst=peer) for peer in self._peers]

    def heard(self) -> list[int]:
        """Waits for the others; the largest of all ranks' flags, one by one.

        Raises:
            PlanError: `shard-diverged`, on every rank, where some rank is about to do something else.
        """
        wait_all(self._works)
        for peer, heard in self._heard.items():
            if (other := tuple(heard.tolist())) != self._said:
                raise self._diverged(peer, other)
        if not self._own:
            return []
        wait_all(self._later)
        return [max(flags) for flags in zip(self._own, *(f.tolist() for f in self._flags.values()), strict=True)]

    def _diverged(self, peer: int, other: tuple[int, ...]) -> PlanError:
        mine, theirs = (
            f"rank {dist.get_global_rank(self._group, rank)} {_DOES[kind].format(unit_name(unit))}"
            for rank, (kind, unit) in ((dist.get_rank(self._group), self._said), (peer, other))
        )
        return PlanError(
            "shard-diverged",
            "ranks compute different parts of a model that is divided over them.",
            why=f"{mine}, {theirs}: a unit needs every rank, in one order",
            fix="let every rank use the same modules in the same order; or, where data decide which are used, make one "
            "unit of the whole model: options={'shard': {'wrap': 'none'}}",
        )
