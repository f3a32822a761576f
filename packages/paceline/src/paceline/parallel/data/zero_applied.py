"""What `zero` does to a model: optimizers step a part of each parameter, or some of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.log import info
from paceline.parallel.data.division import ByParameters, ByRows, step_divided
from paceline.parallel.data.fsdp import forget_with
from paceline.parallel.data.reducer import Reducer
from paceline.parallel.data.rows import Rows
from paceline.parallel.data.zero import ZeroOptions
from paceline.parallel.optimizer_adapter import OptimizerAdapter, closure_refused
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision
from paceline.world.param_groups import elementwise_parameters, inner_optimizers, is_elementwise, parameters_of
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import division_of


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """At stage 2 registers the reducer's hooks and broadcasts rank 0's parameters and buffers. Ranks: all."""
    without_values = any(parameter.is_meta for parameter in model.parameters())
    if context.plan.zero == 1 or without_values:
        return DividedStates(model, context)
    answer_for_whole_tensors()
    return DividedGradients(model, context)


class DividedStates(AppliedStrategy):
    """Stage 1 on one model."""

    def __init__(self, model: nn.Module, context: Context) -> None:
        super().__init__(model)
        self._context = context

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Divides the states of the optimizer, including those that it already has.

        Raises:
            TrainError: `step-closure`, for LBFGS, which steps with a closure.
        """
        optimizer = adapter.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise closure_refused(optimizer)
        if inner_optimizers(optimizer):  # the states of these are divided, and each of them is bound, too
            return []
        kind = type(optimizer).__name__
        options: ZeroOptions = self._context.options
        what, reason = _divided_by(optimizer, options, self._context.facts)
        mesh = self._context.mesh.along("shard")
        # Frozen ones too, which may be unfrozen later.
        by_rows: list[nn.Parameter] = []
        by_parameters: list[nn.Parameter] = []
        independent = set(elementwise_parameters(optimizer))
        for parameter in self.module.parameters():
            # Another model of this optimizer may share it, or the optimizer was prepared before: it stays divided as it is.
            known = division_of(optimizer, parameter)
            if known is not None:
                adapter.swap(known.stepping)
                continue
            if what == "rows" or (what == "rows and parameters" and parameter in independent):
                by_rows.append(parameter)
            else:
                by_parameters.append(parameter)
        limit = int(options.bucket_cap_mb * 2**20)
        divisions: list[ByRows | ByParameters] = []
        if by_rows:
            divisions.append(ByRows(mesh, by_rows, limit))
        if by_parameters:
            divisions.append(ByParameters(mesh, by_parameters, limit))
        for division in divisions:
            step_divided(adapter, division)
        info("parallel", f"{kind} is divided by {what}: {reason}")
        return [Decision(f"optimizer.{kind}.divided", what, "derived", reason=reason)]


class DividedGradients(Reducer):
    """Stage 2 on one model: a gradient is whole until it is reduced, and then a DTensor of this rank's rows."""

    def __init__(self, model: nn.Module, context: Context) -> None:
        options: ZeroOptions = context.options
        self._rows = Rows(context.mesh, options.bucket_cap_mb)
        super().__init__(model, context, self._rows)
        self._states = DividedStates(model, context)
        forget_with(model, lambda _: self._rows.forget(model.parameters()))

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Divides the states as stage 1 does. From now on a step on gradients that were not reduced is refused.

        Raises:
            TrainError: `step-closure`; in a step: `step-held`.
        """
        decisions = self._states.bind(adapter)
        adapter.refuse(self.refuse_unreduced)
        adapter.forget(lambda _: self._rows.forget(parameters_of(adapter.optimizer)))
        return decisions

    def held_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of gradients that were reduced before, and set aside since."""
        return iter(self._rows.earlier.items())

    def pending_gradients(self) -> PendingGradients:
        """Returns the rows of gradients that are reduced already."""
        return PendingGradients(self._rows.pending(self.slots))

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores reduced rows from a checkpoint, beside whole gradients that are in `.grad` already."""
        super().restore_pending(pending)
        self._rows.reset()
        self._rows.restore(pending.gradients)


def _divided_by(optimizer: Optimizer, options: ZeroOptions, facts: ModelFacts) -> tuple[str, str]:
    """Returns what each rank steps, "rows", "parameters" or "rows and parameters", and the reason."""
    if options.divide != "auto":
        return options.divide, f"zero.divide={options.divide}"
    if facts.sparse:
        return "parameters", "a sparse gradient has no rows to divide"
    if is_elementwise(optimizer):
        return "rows", "it treats each element by itself"
    if elementwise_parameters(optimizer):
        return (
            "rows and parameters",
            "some of its groups are elementwise; of the others it may look at whole parameters",
        )
    return "parameters", "it may look at a whole parameter, as it does not say that it is elementwise"
