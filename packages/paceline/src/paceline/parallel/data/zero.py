"""`zero`: ZeRO stages 1 and 2 on the `shard` axis. Optimizer states, at stage 2 also gradients, are divided over the ranks.

    stage 1    `replicate` averages whole gradients; each rank steps its rows, then rows are gathered
    stage 2    gradients are reduced to the rows of each rank during the backward pass, and are DTensors from then on
    step       user's hooks -> the optimizer gets rows in place of parameters -> step -> rows are gathered -> user's hooks

In the model and in the optimizer the parameters are plain, unsharded tensors, so the training loop needs no change. FSDP2
(`shard`) does stage 3, and the lower stages together with tensor or pipeline parallelism.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import Problem
from paceline.base.log import info
from paceline.config.kinds import YES_NO, one_of, positive
from paceline.parallel.data.division import ByParameters, ByRows, keep_divided, taken_for_whole
from paceline.parallel.data.fsdp import forget_with
from paceline.parallel.data.reduced import ReducedGradients
from paceline.parallel.data.reducer import Reducer
from paceline.parallel.data.rows import Rows
from paceline.parallel.optimizer_adapter import OptimizerAdapter, closure_refused, step_held
from paceline.parallel.stand_ins import is_elementwise
from paceline.parallel.strategy import AppliedStrategy, Averaging, Context, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.torch_internals.dtensor import is_mixture
from paceline.world.layout import GRADIENT_AXES
from paceline.world.param_groups import inner_optimizers, parameters_of
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import divide


@dataclass(frozen=True)
class ZeroOptions:
    """Options of stages 1 and 2."""

    divide: str = option(
        "auto",
        one_of("auto", "rows", "parameters"),
        "What a rank updates: rows of each parameter, or whole parameters; auto: rows with elementwise optimizers.",
    )
    bucket_cap_mb: float = option(
        25, positive(), "Small tensors are sent together, in buckets of at most this many MiB."
    )
    broadcast_buffers: bool = option(
        True, YES_NO, "Stage 2: the buffers of rank 0 are sent to all ranks at the end of each window in training."
    )


class Zero(Strategy):
    """Divides optimizer states (stage 1), and also gradients (stage 2), over the `shard` axis."""

    name = "zero"
    stage = 60
    axes = ("shard", "replicate")
    Options = ZeroOptions
    divides_steps = True
    averaging = Averaging(
        over="stage 1: left to `replicate`; stage 2: shard, then replicate and cp",
        when="stage 2: as `replicate`",
        result="stage 2: the rank's rows of the mean, a DTensor",
    )

    def wanted(self, plan: Plan) -> bool:
        """Used for stages 1 and 2, unless FSDP2 does them."""
        return plan.layout.shard > 1 and plan.zero in (1, 2) and not plan.fully_sharded

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses sparse gradients at stage 2: their rows cannot be reduced to one rank each."""
        if plan.zero != 2 or not facts.sparse:
            return []
        return [
            Problem(
                "zero-sparse",
                f"{facts.name} has sparse gradients, which stage 2 cannot divide.",
                why=[origin(plan, "zero"), "some module was built with sparse=True"],
                fix="use zero=1, which divides the optimizer's states by whole parameters then; or sparse=False",
            )
        ]

    def keeps_apart(self, plan: Plan) -> str:
        """Stage 2 reduces the gradients of each model to rows."""
        if plan.zero != 2:
            return ""
        return "use zero=0 or 1, under which gradients are whole"

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says what the stage divides; `bind` says how it divides a given optimizer."""
        width = plan.layout.shard
        what = "each parameter's optimizer states"
        if plan.zero > 1:
            what += " and gradients"
        return [
            Decision("zero.divides", what, "derived", reason=f"over shard={width}; parameters stay whole on every rank")
        ]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Divides the states, at stage 2 also the gradients, by the number of ranks n, and adds the gathering of rows.

        With float32 parameters of a elements and Adam, a rank holds 8a + 8a/n bytes at stage 1, and 4a + 12a/n at stage 2.
        """
        n = plan.layout.shard
        cap = int(self.options(plan).bucket_cap_mb * 2**20)
        trained = before.gradients
        gathered = (n - 1) * trained // n
        divided = replace(before, optimizer=-(-before.optimizer // n), sent=before.sent + gathered)
        if plan.zero == 1:
            return replace(divided, buffers=before.buffers + min(cap, trained))
        gradients = -(-trained // n)
        # Behind the reduce-scatter along `shard`, rows are summed over the ranks along the other axes by an all-reduce.
        others = plan.layout.size(*GRADIENT_AXES) // n
        sent = divided.sent + gathered + 2 * (others - 1) * gradients // others
        return replace(divided, gradients=gradients, buffers=before.buffers + min(2 * cap, 2 * trained), sent=sent)

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """At stage 2 registers the reducer's hooks and broadcasts rank 0's parameters and buffers. Ranks: all."""
        without_values = any(parameter.is_meta for parameter in model.parameters())
        if context.plan.zero == 1 or without_values:
            return DividedStates(model, context)
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
        trained = list(self.module.parameters())
        limit = int(options.bucket_cap_mb * 2**20)
        division: ByRows | ByParameters
        if what == "rows":
            division = ByRows(mesh, trained, limit)
        else:
            division = ByParameters(mesh, trained, limit)
        keep_divided(optimizer, division)
        divide(optimizer, division)
        adapter.swap(division.stepping)
        info("parallel", f"{kind} is divided by {what}: {reason}")
        return [Decision(f"optimizer.{kind}.divided", what, "derived", reason=reason)]


class DividedGradients(ReducedGradients):
    """Stage 2 on one model: a gradient is whole until it is reduced, and then a DTensor of this rank's rows."""

    def __init__(self, model: nn.Module, context: Context) -> None:
        options: ZeroOptions = context.options
        self._rows = Rows(context.mesh, options.bucket_cap_mb, type(model).__name__)
        reducer = Reducer(
            model,
            self._rows,
            broadcast_buffers=options.broadcast_buffers,
            siblings=ReducedGradients.reducers_of(context),
        )
        super().__init__(model, reducer)
        self._states = DividedStates(model, context)
        forget_with(model, lambda _: self._rows.forget(model.parameters()))

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Divides the states as stage 1 does. From now on a step on gradients that were not reduced is refused.

        Raises:
            TrainError: `step-closure`; in a step: `step-held`.
        """
        decisions = self._states.bind(adapter)

        def refuse_unreduced(optimizer: Optimizer) -> None:
            if self.reducer.unfinished:
                raise step_held(optimizer)

        adapter.refuse(refuse_unreduced)
        adapter.surround(partial(_explained, adapter.optimizer))
        adapter.forget(lambda _: self._rows.forget(parameters_of(adapter.optimizer)))
        return decisions

    def held_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of gradients that were reduced before, and set aside since."""
        return iter(self._rows.earlier.items())

    def pending_gradients(self) -> PendingGradients:
        """Returns the rows of gradients that are reduced already."""
        return PendingGradients(self._rows.pending(self.reducer.slots))

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores reduced rows from a checkpoint, beside whole gradients that are in `.grad` already."""
        super().restore_pending(pending)
        self._rows.reset()
        self._rows.restore(pending.gradients)


@contextmanager
def _explained(optimizer: Optimizer, method: str) -> Iterator[None]:
    """Makes methods that a script's own optimizer has beside `step` raise an error with a fix if they take gradients for whole.

    `step` gets what it needs, see `ByParameters`, but not that of an optimizer which steps through others. Gathering gradients
    for other methods as well would be wrong: a method that only describes the optimizer may be called on one rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_mixture(error) or (method == "step" and not inner_optimizers(optimizer)):
            raise
        raise taken_for_whole(f"{type(optimizer).__name__}.{method}") from error


def _divided_by(optimizer: Optimizer, options: ZeroOptions, facts: ModelFacts) -> tuple[str, str]:
    """Returns what each rank steps, "rows" or "parameters", and the reason."""
    if options.divide != "auto":
        return options.divide, f"zero.divide={options.divide}"
    if facts.sparse:
        return "parameters", "a sparse gradient has no rows to divide"
    if is_elementwise(optimizer):
        return "rows", "it treats each element by itself"
    return "parameters", "it may look at a whole parameter, as it does not say that it is elementwise"


STRATEGY = Zero()
