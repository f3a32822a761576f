"""Ranks tell each other what they are about to send, so that none takes one unit's numbers for another's.

    GATHER    "the parameters of blocks.2"                          with the parameters themselves: no time is lost
    REDUCE    "the gradients of blocks.2, of which I have these"    before; a rank that lacks some sends zeros
    END       "my backward pass is over"

FSDP2 itself pairs whatever comes next: on ranks that compute different blocks a rank would use another block's
parameters without a word, abort, or wait for ever. Where transport is pairwise the ranks always check. On other backends a
check costs a round trip between the hosts for each unit, so that only debug mode makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import PlanError
from paceline.torch_internals import fsdp as internals
from paceline.world import runtime
from paceline.world.mesh import unit_name
from paceline.world.transport import PairwiseTransport, transport_of

if TYPE_CHECKING:
    from paceline.torch_internals.fsdp import FSDPParamGroup

GATHER, REDUCE, END = range(3)
_DOES = ("gathers the parameters of {}", "reduces the gradients of {}", "has ended the backward pass of {}")
_TAG = 1 << 20  # of statements; the tags after it are those of flags, one a unit


class Statement:
    """What each rank of a group is about to do.

    Args:
        group: takes tensors on the CPU. All of its ranks make a statement, as often.
        kind, unit: what this rank is about to do, and with which unit.
        flags: small numbers that are the rank's own; as many on all ranks that say the same.
    """

    def __init__(self, group: dist.ProcessGroup, kind: int, unit: int, flags: Sequence[int] | None = None) -> None:
        self._transport = PairwiseTransport(group)
        self._own_statement = [kind, unit]
        self._own_flags = list(flags or ())
        size = self._transport.size
        statement = torch.tensor(self._own_statement)
        own = torch.tensor(self._own_flags, dtype=torch.uint8)
        self._statements = torch.empty(size, 2, dtype=torch.int64)
        self._flags = torch.empty(size, len(self._own_flags), dtype=torch.uint8)
        if not runtime.current().others_answer:
            # In a rehearsal nothing arrives: the other ranks are about to do the same.
            self._statements[:] = statement
            self._flags[:] = own
        self._under_way = self._transport.all_gather(self._statements, statement, _TAG)
        if self._own_flags:
            # A tag for each unit: ranks that are about to do different things may have different numbers of flags.
            self._flags_under_way = self._transport.all_gather(self._flags, own, _TAG + 1 + unit)

    def heard(self) -> list[int]:
        """Waits for the other ranks, and gives the largest of all ranks' flags, one by one.

        Raises:
            PlanError: `shard-diverged`, on every rank, where some rank is about to do something else.
        """
        self._under_way.wait()
        for rank, statement in enumerate(self._statements.tolist()):
            if statement != self._own_statement:
                raise self._diverged(rank, statement)
        if not self._own_flags:
            return []
        self._flags_under_way.wait()
        largest: list[int] = self._flags.amax(0).tolist()
        return largest

    def _diverged(self, peer: int, statement: list[int]) -> PlanError:
        mine = self._in_words(self._transport.rank, self._own_statement)
        theirs = self._in_words(peer, statement)
        return PlanError(
            "shard-diverged",
            "ranks compute different parts of a model that is divided over them.",
            why=f"{mine}, {theirs}: a unit needs every rank, in one order",
            fix="let every rank use the same modules in the same order; or, where data decide which are used, make one "
            "unit of the whole model: options={'shard': {'wrap': 'none'}}",
        )

    def _in_words(self, rank: int, statement: list[int]) -> str:
        kind, unit = statement
        global_rank = dist.get_global_rank(self._transport.group, rank)
        return f"rank {global_rank} {_DOES[kind].format(unit_name(unit))}"


def announce(parameters: FSDPParamGroup, hosts: dist.ProcessGroup, unit: int) -> None:
    """Lets a parameter group tell other ranks what it is about to send; and send it in pairs, where that is faster.

    Args:
        parameters: what is gathered and reduced together.
        hosts: the ranks that do so; takes tensors on the CPU.
        unit: the number of the parameter group, see `register_unit`.
    """
    gather_class, scatter_class = internals.communication_classes()
    plain_gather, plain_scatter = internals.communication_of(parameters)

    class Gather(gather_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_gather.allocate)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            statement = Statement(hosts, GATHER, unit)
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                statement.heard()
                return plain_gather(output_tensor, input_tensor, group, async_op)
            # The parameters travel beside the statement, so that it costs no time.
            under_way = transport.all_gather(output_tensor, input_tensor, tag=unit)
            statement.heard()
            under_way.wait()
            return None

    class Scatter(scatter_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_scatter.allocate)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: dist.ReduceOp.RedOpType,
            async_op: bool = False,
        ) -> dist.Work | None:
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                return plain_scatter(output_tensor, input_tensor, group, op, async_op)
            average = op == dist.ReduceOp.AVG
            transport.reduce_scatter(output_tensor, input_tensor, average, tag=unit).wait()
            return None

    def add_zeros() -> None:
        """Zeros for what only other ranks have gradients of."""
        if not internals.reduces_gradients(parameters):
            return
        members = internals.group_parameters(parameters)
        has_gradient = [internals.pending_gradient(parameter) is not None for parameter in members]
        used = Statement(hosts, REDUCE, unit, has_gradient).heard()
        for parameter, on_this_rank, on_any_rank in zip(members, has_gradient, used, strict=True):
            if on_any_rank and not on_this_rank:
                internals.add_zero_gradient(parameter)

    internals.replace_communication(parameters, Gather(), Scatter(), before_reduction=add_zeros)
