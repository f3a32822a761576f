"""Ranks check that all of them are about to gather, or to reduce, the same FSDP2 unit.

    GATHER    the parameters of a unit     sent together with the parameters, so that the check takes no time
    REDUCE    the gradients of a unit      sent before the reduction, with the parameters that have a gradient here; a rank
                                           that lacks some of them contributes zeros
    END       the end of a backward pass
    EVALUATE  as GATHER, but without gradients: one rank that evaluates alone is told so

FSDP2 itself does not check. If ranks compute different blocks, their collectives are paired in the order in which they come:
a rank would silently use the parameters of another block, abort, or wait for ever. With a pairwise transport (gloo) the
ranks always check. On other backends a check costs a round trip between the hosts for each unit, so only debug mode does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import PlanError
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.dispatch import is_in_backward_pass
from paceline.world import runtime
from paceline.world.mesh import unit_name
from paceline.world.transport import PairwiseTransport, transport_of

if TYPE_CHECKING:
    from paceline.torch_internals.fsdp import FSDPParamGroup

GATHER, REDUCE, END, EVALUATE = range(4)
_DOES = (
    "gathers the parameters of {}",
    "reduces the gradients of {}",
    "has ended the backward pass of {}",
    "evaluates, and gathers the parameters of {}",
)
_TAG = 1 << 20  # of statements; the tags after it are those of flags, one a unit


class Statement:
    """One check: each rank of a group announces what it is about to do.

    Args:
        group: a group for tensors on the CPU. All of its ranks must construct the same number of statements.
        kind: `GATHER`, `REDUCE`, `END` or `EVALUATE`.
        unit: the number of the unit, see `register_unit`.
        flags: small numbers of this rank; ranks with equal `kind` and `unit` have the same number of them.
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
            # A rehearsal has no other ranks: it assumes that they would announce the same.
            self._statements[:] = statement
            self._flags[:] = own
        self._under_way = self._transport.all_gather(self._statements, statement, _TAG)
        if self._own_flags:
            # Each unit has a tag of its own: ranks that announce different units may send different numbers of flags.
            self._flags_under_way = self._transport.all_gather(self._flags, own, _TAG + 1 + unit)

    def wait(self) -> list[int]:
        """Waits for the statements of all ranks.

        Returns:
            The element-wise maximum of all ranks' flags.

        Raises:
            PlanError: `shard-diverged`, on every rank, if some rank has announced something else.
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
        if EVALUATE in (self._own_statement[0], statement[0]) and self._own_statement[0] != statement[0]:
            return PlanError(
                "shard-evaluation",
                "some ranks evaluate a model that is divided over all of them, and others do not.",
                why=f"{mine}, {theirs}: each rank has only a part of the parameters",
                fix="evaluate on all ranks, with a prepared loader. For one rank alone, let all ranks call "
                "`accelerator.get_state_dict(model)`, and load the result into a second model on that rank",
            )
        return PlanError(
            "shard-diverged",
            "ranks compute different parts of a model that is divided over them.",
            why=f"{mine}, {theirs}: all ranks must use each unit, in the same order",
            fix="use the same modules in the same order on every rank. If the data decide which modules are used, make the "
            "whole model one unit: options={'shard': {'wrap': 'none'}}",
        )

    def _in_words(self, rank: int, statement: list[int]) -> str:
        kind, unit = statement
        global_rank = dist.get_global_rank(self._transport.group, rank)
        return f"rank {global_rank} {_DOES[kind].format(unit_name(unit))}"


def announce(parameters: FSDPParamGroup, hosts: dist.ProcessGroup, unit: int) -> None:
    """Adds the checks to the communication of a parameter group, and uses pairwise transports where these are faster.

    Args:
        parameters: the parameter group of FSDP2.
        hosts: a group of the same ranks for tensors on the CPU.
        unit: the number of the parameter group, see `register_unit`.
    """
    gather_class, scatter_class = internals.communication_classes()
    plain_gather, plain_scatter = internals.communication_of(parameters)

    class Gather(gather_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_gather.allocate)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            trains = torch.is_grad_enabled() or is_in_backward_pass()
            statement = Statement(hosts, GATHER if trains else EVALUATE, unit)
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                statement.wait()
                return plain_gather(output_tensor, input_tensor, group, async_op)
            # The parameters are sent at the same time as the statement, so that the check takes no time.
            under_way = transport.all_gather(output_tensor, input_tensor, tag=unit)
            statement.wait()
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
        """Adds zero gradients to parameters that only other ranks have used."""
        if not internals.reduces_gradients(parameters):
            return
        members = internals.group_parameters(parameters)
        has_gradient = [internals.pending_gradient(parameter) is not None for parameter in members]
        used = Statement(hosts, REDUCE, unit, has_gradient).wait()
        for parameter, on_this_rank, on_any_rank in zip(members, has_gradient, used, strict=True):
            if on_any_rank and not on_this_rank:
                internals.add_zero_gradient(parameter)

    internals.replace_communication(parameters, Gather(), Scatter(), before_reduction=add_zeros)
