"""Ranks check that all of them are about to gather, or to reduce, the same FSDP2 unit.

    GATHER    the parameters of a unit
    EVALUATE  the same without gradients
    REDUCE    the gradients of a unit, with the parameters that have a gradient here; a rank that lacks some of them
              contributes zeros
    END       the end of a backward pass

FSDP2 itself does not check. If ranks compute different blocks, their collectives are paired in the order in which they come:
a rank would silently use the parameters of another block, abort, or wait for ever. The check is an exchange of all ranks, with
which each operation of the accelerator begins, too. So a rank that calls the model alone, in whichever mode, and ranks that
wait in a barrier or train meanwhile notice it together.

If gloo carries the parameters, the ranks always check. On other backends a check costs a round trip between the hosts for each
unit, so only debug mode does it; otherwise the ranks check where an evaluation begins: at the first gather without gradients
since the model was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError, PlanError
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.dispatch import is_in_backward_pass
from paceline.world.mesh import register_unit
from paceline.world.transport import transport_of

if TYPE_CHECKING:
    from paceline.torch_internals.fsdp import FSDPParamGroup
    from paceline.world.collectives import Collectives

GATHER, EVALUATE = "gathers the parameters of", "evaluates, and gathers the parameters of"
REDUCE, END = "reduces the gradients of", "has ended the backward pass of"
_DISAGREEMENTS = ("collective-mismatch", "collective-diverged")


class Agreement:
    """What the ranks of one divided model agree about.

    Args:
        name: the name of the model, for errors.
        group: the ranks that divide the model; its messages are tagged with the numbers of units.
        collectives: of all ranks; in a pipeline, whose stages do different things, of those of one stage.
        checks_units: whether ranks check each unit, or only where an evaluation begins.
        others_answer: False in a rehearsal, which has no other ranks: it assumes that they would do the same.

    Ranks:
        All of the group construct it, in the same order as other models.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, collectives: Collectives, checks_units: bool, others_answer: bool
    ) -> None:
        self.group = group
        self.checks_units = checks_units
        self._name = f"{name} (model {register_unit(group)})"
        self._collectives = collectives
        self._others_answer = others_answer
        self._is_evaluating = False

    def end_pass(self, flags: Sequence[int]) -> list[int]:
        """Returns the largest of each flag over the ranks, which have all ended a backward pass."""
        return self._agree(END, self._name, flags) if self.checks_units else list(flags)

    def reduce(self, unit: str, flags: Sequence[int]) -> list[int]:
        """Returns the largest of each flag over the ranks, which are about to reduce the gradients of a unit."""
        return self._agree(REDUCE, unit, flags)

    def gather(self, unit: str) -> None:
        """Called before the parameters of a unit are gathered, in the script's mode: FSDP2 gathers without gradients.

        Raises:
            PlanError: `shard-diverged` or `shard-evaluation`, if some ranks do something else.
        """
        evaluates = not (torch.is_grad_enabled() or is_in_backward_pass())
        begins = evaluates and not self._is_evaluating
        self._is_evaluating = False
        if self.checks_units or begins:
            self._agree(EVALUATE if evaluates else GATHER, unit)
        self._is_evaluating = evaluates

    def _agree(self, does: str, unit: str, flags: Sequence[int] = ()) -> list[int]:
        if not self._others_answer:
            return list(flags)
        try:
            return self._collectives.combine(f"{does} {unit}", "", flags, "max")
        except CollectiveError as error:
            if error.code not in _DISAGREEMENTS:
                raise
            raise _diverged(does, error) from error


def _diverged(does: str, error: CollectiveError) -> PlanError:
    """Returns the error of a rank that `does` something else than other ranks, which `error` lists."""
    reasons = error.problems[0].why
    reasons = [reasons] if isinstance(reasons, str) else list(reasons)
    alone = (
        "For one rank alone, let all ranks call `accelerator.get_state_dict(model)`, and load the result into a second "
    )
    alone += "model on that rank"
    if does == EVALUATE or any(EVALUATE in reason for reason in reasons):
        return PlanError(
            "shard-evaluation",
            "some ranks evaluate a model that is divided over all of them, and others do not.",
            why=[*reasons, "each rank has only a part of the parameters"],
            fix=f"evaluate on all ranks, with a prepared loader. {alone}",
        )
    if not all(any(use in reason for use in (GATHER, REDUCE, END)) for reason in reasons):
        return PlanError(
            "shard-diverged",
            "some ranks use a model that is divided over all of them, and others do not.",
            why=[*reasons, "each rank has only a part of the parameters"],
            fix=f"call the model, and its backward pass, on all ranks. {alone}",
        )
    return PlanError(
        "shard-diverged",
        "ranks compute different parts of a model that is divided over them.",
        why=[*reasons, "all ranks must use each unit, in the same order"],
        fix="use the same modules in the same order on every rank. If the data decide which modules are used, make the "
        "whole model one unit: options={'shard': {'wrap': 'none'}}",
    )


def announce(parameters: FSDPParamGroup, agreement: Agreement, name: str) -> None:
    """Adds the checks to the communication of a parameter group, and uses pairwise transports where these are faster.

    Args:
        parameters: the parameter group of FSDP2.
        agreement: of the model.
        name: of the unit, for errors.
    """
    tag = register_unit(agreement.group)
    unit = f"{name} (unit {tag})"
    internals.call_before_gathering(parameters, lambda: agreement.gather(unit))
    if not agreement.checks_units:
        return
    gather_class, scatter_class = internals.communication_classes()
    plain_gather, plain_scatter = internals.communication_of(parameters)

    class Gather(gather_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_gather.allocate)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                return plain_gather(output_tensor, input_tensor, group, async_op)
            transport.all_gather(output_tensor, input_tensor, tag=tag).wait()
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
            transport.reduce_scatter(output_tensor, input_tensor, average, tag=tag).wait()
            return None

    def add_zeros(members: list[internals.FSDPParam]) -> None:
        """Adds zero gradients to parameters that only other ranks have used."""
        has_gradient = [internals.pending_gradient(parameter) is not None for parameter in members]
        used = agreement.reduce(unit, list(map(int, has_gradient)))
        for parameter, on_this_rank, on_any_rank in zip(members, has_gradient, used, strict=True):
            if on_any_rank and not on_this_rank:
                internals.add_zero_gradient(parameter)
        internals.equalise_pending(parameters)

    internals.replace_communication(parameters, Gather(), Scatter())
    internals.call_before_reduction(parameters, add_zeros)
