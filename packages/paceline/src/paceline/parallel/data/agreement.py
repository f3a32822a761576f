"""Ranks check that all of them are about to gather, or to reduce, the same FSDP2 unit.

    GATHER    the parameters of a unit     sent together with the parameters, so that the check takes no time
    REDUCE    the gradients of a unit      sent before the reduction, with the parameters that have a gradient here; a rank
                                           that lacks some of them contributes zeros
    END       the end of a backward pass
    BEGIN     as GATHER, but without gradients, for the first time since the model was trained: an evaluation begins
    EVALUATE  as BEGIN, in the same evaluation

A rank that evaluates alone, while the others wait in a barrier, gets no statements from them. Therefore an evaluation begins
with a barrier of its own, as each operation of the accelerator begins with an exchange: ranks that are in different
operations notice it together. A rank that trains sees BEGIN in a statement, and goes to that barrier to decline.

FSDP2 itself does not check. If ranks compute different blocks, their collectives are paired in the order in which they come:
a rank would silently use the parameters of another block, abort, or wait for ever. With a pairwise transport (gloo) the
ranks always check. On other backends a check costs a round trip between the hosts for each unit, so only debug mode does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError, PlanError
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.dispatch import is_in_backward_pass
from paceline.world.mesh import register_unit, unit_name
from paceline.world.transport import PairwiseTransport, transport_of

if TYPE_CHECKING:
    from paceline.torch_internals.fsdp import FSDPParamGroup
    from paceline.world.collectives import Collectives

GATHER, REDUCE, END, EVALUATE, BEGIN = range(5)
_DOES = (
    "gathers the parameters of {}",
    "reduces the gradients of {}",
    "has ended the backward pass of {}",
    "evaluates, and gathers the parameters of {}",
    "begins to evaluate, and gathers the parameters of {}",
)
_EVALUATES = (EVALUATE, BEGIN)
_TAG = 1 << 20  # of statements; the tags after it are those of flags, one a unit


class Agreement:
    """What the ranks of one divided model agree about.

    Args:
        name: the name of the model, for errors.
        hosts: a group of the ranks that divide the model, for tensors on the CPU; None where ranks make no statements.
        collectives: of all ranks, which begin an evaluation together; None in a pipeline, whose stages begin one after the
            other.
        others_answer: False in a rehearsal, which has no other ranks: it assumes that they would announce the same.

    Ranks:
        All of the group construct it, in the same order as other models.
    """

    def __init__(
        self, name: str, hosts: dist.ProcessGroup | None, collectives: Collectives | None, others_answer: bool = True
    ) -> None:
        self.hosts = hosts
        self._others_answer = others_answer
        self._number = None if hosts is None else register_unit(hosts, name)
        self._collectives = collectives
        self._operation = f"evaluation of {name}, whose parameters are divided over all ranks"
        self._is_evaluating = False
        self._next_kind = GATHER

    def end_pass(self, flags: Sequence[int]) -> list[int]:
        """Returns the largest of each flag over the ranks, which have all ended a backward pass."""
        if self._number is None:
            return list(flags)
        return self.state(END, self._number, flags).wait()

    def state(self, kind: int, unit: int, flags: Sequence[int] = ()) -> Statement:
        """Announces what this rank is about to do."""
        assert self.hosts is not None
        return Statement(self.hosts, kind, unit, flags, self._decline, self._others_answer)

    def note_mode(self) -> None:
        """Called before parameters are gathered, in the script's mode: FSDP2 turns gradients off while it gathers."""
        if torch.is_grad_enabled() or is_in_backward_pass():
            self._next_kind = GATHER
        elif self._is_evaluating:
            self._next_kind = EVALUATE
        else:
            self._next_kind = BEGIN

    def gather(self, unit: int) -> Statement:
        """Announces that the parameters of a unit are gathered.

        Raises:
            PlanError: `shard-evaluation`, if an evaluation begins, and some ranks do something else.
        """
        # Ranks that train wait for the statement, so that it goes out before this rank waits in the barrier.
        statement = self.state(self._next_kind, unit)
        self._begin()
        return statement

    def begin_if_evaluation(self) -> None:
        """Takes the place of `gather` where ranks make no statements.

        Raises:
            PlanError: `shard-evaluation`.
        """
        self.note_mode()
        self._begin()

    def _begin(self) -> None:
        self._is_evaluating = self._next_kind in _EVALUATES
        if self._next_kind != BEGIN or self._collectives is None or not self._others_answer:
            return
        try:
            self._collectives.barrier(self._operation)
        except CollectiveError as error:
            self._is_evaluating = False
            raise _evaluation_of_some(error.problems[0].why) from error

    def _decline(self, what: str) -> None:
        """Ends the wait of ranks that begin an evaluation, which this rank does not."""
        if self._collectives is not None:
            self._collectives.decline(self._operation, what)


class Statement:
    """One check: each rank of a group announces what it is about to do.

    Args:
        group: a group for tensors on the CPU. All of its ranks must construct the same number of statements.
        kind: `GATHER`, `REDUCE`, `END`, `EVALUATE` or `BEGIN`.
        unit: the number of the unit, see `register_unit`.
        flags: small numbers of this rank; ranks with equal `kind` and `unit` have the same number of them.
        decline: called with what this rank does, if others begin an evaluation and this rank does not.
        others_answer: see `Agreement`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        kind: int,
        unit: int,
        flags: Sequence[int] = (),
        decline: Callable[[str], object] = lambda what: None,
        others_answer: bool = True,
    ) -> None:
        self._transport = PairwiseTransport(group)
        self._own_statement = [kind, unit]
        self._own_flags = list(flags)
        self._decline = decline
        size = self._transport.size
        statement = torch.tensor(self._own_statement)
        own = torch.tensor(self._own_flags, dtype=torch.uint8)
        self._statements = torch.empty(size, 2, dtype=torch.int64)
        self._flags = torch.empty(size, len(self._own_flags), dtype=torch.uint8)
        if not others_answer:
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
            PlanError: `shard-diverged` or `shard-evaluation`, on every rank, if some rank has announced something else.
        """
        self._under_way.wait()
        statements = self._statements.tolist()
        for rank, statement in enumerate(statements):
            if statement != self._own_statement:
                raise self._diverged(rank, statements)
        if not self._own_flags:
            return []
        self._flags_under_way.wait()
        largest: list[int] = self._flags.amax(0).tolist()
        return largest

    def _diverged(self, peer: int, statements: Sequence[Sequence[int]]) -> PlanError:
        """Returns the error of a rank that does something else than `peer`."""
        mine = self._in_words(self._transport.rank, self._own_statement)
        theirs = self._in_words(peer, statements[peer])
        own_kind = self._own_statement[0]
        kinds = {kind for kind, _ in statements}
        if BEGIN in kinds and own_kind != BEGIN:
            self._decline(mine)
        if kinds.intersection(_EVALUATES) and not kinds.issubset(_EVALUATES):
            return _evaluation_of_some([mine, theirs])
        return PlanError(
            "shard-diverged",
            "ranks compute different parts of a model that is divided over them.",
            why=f"{mine}, {theirs}: all ranks must use each unit, in the same order",
            fix="use the same modules in the same order on every rank. If the data decide which modules are used, make the "
            "whole model one unit: options={'shard': {'wrap': 'none'}}",
        )

    def _in_words(self, rank: int, statement: Sequence[int]) -> str:
        kind, unit = statement
        global_rank = dist.get_global_rank(self._transport.group, rank)
        return f"rank {global_rank} {_DOES[kind].format(unit_name(self._transport.group, unit))}"


def _evaluation_of_some(why: str | Sequence[str]) -> PlanError:
    reasons = [why] if isinstance(why, str) else list(why)
    return PlanError(
        "shard-evaluation",
        "some ranks evaluate a model that is divided over all of them, and others do not.",
        why=[*reasons, "each rank has only a part of the parameters"],
        fix="evaluate on all ranks, with a prepared loader. For one rank alone, let all ranks call "
        "`accelerator.get_state_dict(model)`, and load the result into a second model on that rank",
    )


def announce(parameters: FSDPParamGroup, agreement: Agreement, name: str) -> None:
    """Adds the checks to the communication of a parameter group, and uses pairwise transports where these are faster.

    Args:
        parameters: the parameter group of FSDP2.
        agreement: of the model.
        name: of the unit, for errors.
    """
    if agreement.hosts is None:
        internals.call_before_gathering(parameters, agreement.begin_if_evaluation)
        return
    unit = register_unit(agreement.hosts, name)
    gather_class, scatter_class = internals.communication_classes()
    plain_gather, plain_scatter = internals.communication_of(parameters)

    class Gather(gather_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_gather.allocate)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            statement = agreement.gather(unit)
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

    def add_zeros(members: list[internals.FSDPParam]) -> None:
        """Adds zero gradients to parameters that only other ranks have used."""
        has_gradient = [internals.pending_gradient(parameter) is not None for parameter in members]
        used = agreement.state(REDUCE, unit, has_gradient).wait()
        for parameter, on_this_rank, on_any_rank in zip(members, has_gradient, used, strict=True):
            if on_any_rank and not on_this_rank:
                internals.add_zero_gradient(parameter)
        internals.equalise_pending(parameters)

    internals.call_before_gathering(parameters, agreement.note_mode)
    internals.replace_communication(parameters, Gather(), Scatter())
    internals.call_before_reduction(parameters, add_zeros)
