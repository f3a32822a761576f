"""`zero`: stages 1 and 2 of the `shard` axis: optimizer states are divided, and gradients too; parameters stay whole.

    stage 1    `replicate` averages whole gradients (DDP); each rank steps its rows and gathers everybody's
    stage 2    gradients are reduced to the rows of each rank during the backward pass, and are DTensors from then on
    step       user's hooks -> rows take the places of parameters -> step -> parameters back, gathered -> user's hooks

Parameters are plain and whole in the model and in the optimizer, so nothing of the user's loop knows of it. Stage 3, and
lower ones together with tensor or pipeline ranks, are FSDP2's (`shard`).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import Problem
from paceline.base.log import logger
from paceline.config.kinds import YES_NO, one_of, positive
from paceline.parallel.division import ByParameters, ByRows, keep_divided
from paceline.parallel.fsdp import forget_with
from paceline.parallel.reducer import Reducer
from paceline.parallel.stand_ins import closure_refused, step_held, swap_in_steps
from paceline.parallel.strategy import Context, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.held import Held
from paceline.world.layout import GRADIENT_AXES
from paceline.world.sharded import divide

_optim = torch.optim
# torch's do not say it themselves. Any other class does by `elementwise = True` in its own body: a subclass may step otherwise.
_ELEMENTWISE_OF_TORCH = (
    _optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adagrad, _optim.Adadelta, _optim.Adamax, _optim.RMSprop,
    _optim.NAdam, _optim.RAdam, _optim.ASGD, _optim.Rprop,
)  # fmt: skip


@dataclass(frozen=True)
class ZeroOptions:
    """Options of stages 1 and 2."""

    divide: str = option(
        "auto",
        one_of("auto", "rows", "parameters"),
        "What a rank steps: rows of each parameter, or whole parameters; auto: rows for elementwise optimizers.",
    )
    bucket_cap_mb: float = option(25, positive(), "Small tensors travel together, up to this many MiB.")
    broadcast_buffers: bool = option(
        True, YES_NO, "Stage 2: rank 0's buffers go to all ranks before each forward pass in training."
    )


class Zero(Strategy):
    """Divides optimizer states (stage 1), and gradients (stage 2), over the `shard` axis."""

    name = "zero"
    stage = 60
    axes = ("shard", "replicate")

    Options = ZeroOptions

    def wanted(self, plan: Plan) -> bool:
        """Wanted for stages 1 and 2 wherever FSDP2 does not serve them."""
        return plan.layout.shard > 1 and plan.zero in (1, 2) and not plan.fully_sharded

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Rows of a sparse gradient are no rows of a tensor."""
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

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """What the stage divides; what it means for an optimizer is said by `bind`."""
        width, axis = plan.layout.shard, "each parameter's optimizer states"
        what = axis if plan.zero == 1 else f"{axis} and gradients"
        return [
            Decision("zero.divides", what, "derived", reason=f"over shard={width}; parameters stay whole on every rank")
        ]

    def cost(self, plan: Plan, facts: ModelFacts, held: Bytes) -> Bytes:
        """States, and at stage 2 gradients, become one n-th; updated rows are gathered.

        With a = bytes of the parameters, Adam: 8a + 8a/n at stage 1, 4a + 12a/n at stage 2.
        """
        n, cap = plan.layout.shard, int(self.options(plan).bucket_cap_mb * 2**20)
        trained = held.gradients
        gathered = (n - 1) * trained // n
        divided = replace(held, optimizer=-(-held.optimizer // n), sent=held.sent + gathered)
        if plan.zero == 1:
            return replace(divided, buffers=held.buffers + min(cap, trained))
        gradients, others = -(-trained // n), plan.layout.size(*GRADIENT_AXES) // n
        sent = divided.sent + gathered + 2 * (others - 1) * gradients // others
        return replace(divided, gradients=gradients, buffers=held.buffers + min(2 * cap, 2 * trained), sent=sent)

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Stage 2: puts the reducer's hooks on the parameters; broadcasts rank 0's parameters and buffers. Ranks: all."""
        if context.plan.zero != 2 or any(parameter.is_meta for parameter in model.parameters()):
            return model
        _REDUCERS[model] = Reducer(
            model, context.mesh, context.options.bucket_cap_mb, context.options.broadcast_buffers
        )
        return model

    def bind(self, optimizer: Optimizer, model: nn.Module, context: Context) -> list[Decision]:
        """Divides the optimizer's states, those that it has already included.

        Raises:
            TrainError: `step-closure` for LBFGS, which steps with a closure; each step: `step-held`.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise closure_refused(optimizer)
        kind, how = type(optimizer), context.options.divide
        if how == "auto" and context.facts.sparse:
            how, reason = "parameters", "a sparse gradient has no rows to divide"
        elif how == "auto" and (kind in _ELEMENTWISE_OF_TORCH or vars(kind).get("elementwise")):
            how, reason = "rows", "it treats each element by itself"
        elif how == "auto":
            how, reason = (
                "parameters",
                "it may look at a whole parameter, as it does not say that it is elementwise",
            )
        else:
            reason = f"zero.divide={how}"
        mesh = context.mesh.along("shard")
        limit = int(context.options.bucket_cap_mb * 2**20)
        division = (ByRows if how == "rows" else ByParameters)(
            mesh, [p for p in model.parameters() if p.requires_grad], limit
        )
        optimizer.register_step_pre_hook(partial(_refuse_held, weakref.ref(model)))
        if model in _REDUCERS:
            forget_with(optimizer, partial(_forget, weakref.ref(model), optimizer))
        keep_divided(optimizer, division)
        divide(optimizer, division)
        swap_in_steps(optimizer, division.stepping)
        logger("parallel").info("%s is divided by %s: %s", kind.__name__, how, reason)
        return [Decision(f"optimizer.{kind.__name__}.divided", how, "derived", reason=reason)]

    @contextmanager
    def hold_gradients(self, model: nn.Module) -> Iterator[None]:
        """Stage 2: gradients stay whole and where they are."""
        reducer = _REDUCERS.get(model)
        with nullcontext() if reducer is None else reducer.holding():
            yield

    def settle(self, model: nn.Module) -> None:
        """Stage 2: reduces what is left, parameters that this rank did not use included. Ranks: all."""
        reducer = _REDUCERS.get(model)
        if reducer is not None:
            reducer.settle()

    def held(self, model: nn.Module) -> Held:
        """Stage 2: rows that were reduced already."""
        return _REDUCERS[model].held() if model in _REDUCERS else Held()

    def take(self, model: nn.Module, held: Held) -> None:
        """Stage 2: takes them back."""
        if model in _REDUCERS:
            _REDUCERS[model].take(held)

    def failed(self, model: nn.Module) -> None:
        """Stage 2: the next backward pass begins anew."""
        if model in _REDUCERS:
            _REDUCERS[model].failed()


def _forget(model: Any, optimizer: Optimizer) -> None:
    if model() in _REDUCERS:
        _REDUCERS[model()].forget(p for group in optimizer.param_groups for p in group["params"])


def _refuse_held(model: Any, optimizer: Optimizer, *_: Any) -> None:
    reducer = _REDUCERS.get(model())
    if reducer is not None and reducer.unfinished:
        raise step_held(optimizer)


_REDUCERS: weakref.WeakKeyDictionary[nn.Module, Reducer] = weakref.WeakKeyDictionary()

STRATEGY = Zero()
