"""`replicate`: every rank holds the whole model and gradients are averaged.

`prepare` returns the module that it was given: hooks on its parameters average the gradients while the backward pass runs
(`reducer.py`), whoever has computed the loss, and by whichever method of the model. The same is done beside tensor, context and
pipeline parallelism, on each rank's part of the gradients; in a pipeline at the end of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from paceline.base.errors import Problem
from paceline.config.kinds import YES_NO, one_of, positive
from paceline.parallel.data.averages import broadcast_tensors, values_of
from paceline.parallel.data.communication_hooks import HOOKS, Hook, hook_of
from paceline.parallel.data.means import Means
from paceline.parallel.data.reduced import ReducedGradients
from paceline.parallel.data.reducer import Reducer
from paceline.parallel.optimizer_adapter import OptimizerAdapter, step_held
from paceline.parallel.strategy import AppliedStrategy, Averaging, Context, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.world.layout import GRADIENT_AXES


@dataclass(frozen=True)
class ReplicateOptions:
    """Options of the averaging of gradients; some have the names that DistributedDataParallel gives them."""

    bucket_cap_mb: float = option(25, positive(), "Small gradients are averaged in buckets of at most this many MiB.")
    broadcast_buffers: bool = option(
        True, YES_NO, "The buffers of rank 0 are sent to all ranks at the end of each window in training."
    )
    unused: str = option(
        "none",
        one_of("none", "zeros"),
        "The gradient of a parameter that no rank has used in a step; zeros: weight decay and momentum move it.",
    )
    comm_hook: str = option("none", one_of("none", *HOOKS), "Compresses gradients before they are sent.")
    comm_wrapper: str = option("none", one_of("none", "bf16", "fp16"), "Casts the data that the hook sends.")
    comm_state: Mapping[str, Any] = option({}, None, "Keywords of the hook's state (PowerSGD).")


class Replicate(Strategy):
    """Data parallel over the `replicate` axis (and over `cp`, and over `shard` where only optimizer states are divided)."""

    name = "replicate"
    stage = 90
    axes = ("replicate",)
    Options = ReplicateOptions
    averaging = Averaging(
        over="replicate, shard and cp",
        when="in each backward pass that is not held, bucket by bucket; what is left at its end",
        result="the mean, whole on every rank",
    )

    def wanted(self, plan: Plan) -> bool:
        """Used if several ranks hold whole gradients of the same parameters, and no other strategy averages them."""
        divided = plan.fully_sharded or (plan.layout.shard > 1 and plan.zero == 2)
        return not divided and plan.layout.size(*GRADIENT_AXES) > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses communication hooks together with tensor or pipeline parallelism."""
        hook = self.options(plan).comm_hook
        if hook == "none":
            return []
        problems: list[Problem] = []
        if plan.layout.size("tp", "pp") > 1:
            problems.append(
                Problem(
                    "replicate-hook",
                    f"gradients cannot be compressed by {hook!r} under this plan.",
                    why=f"replicate.comm_hook={hook}; tp={plan.layout.tp}, pp={plan.layout.pp}: each rank has parts of them",
                    fix="leave replicate.comm_hook out",
                )
            )
        return problems

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Adds what a ring all-reduce sends: 2 (n - 1) / n of the gradients. The buckets are the gradients themselves."""
        width = plan.layout.size(*GRADIENT_AXES)
        return replace(before, sent=before.sent + 2 * (width - 1) * before.gradients // width)

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Registers the hooks, and broadcasts rank 0's parameters and buffers. Ranks: all."""
        return AveragedGradients(model, context)


class AveragedGradients(ReducedGradients):
    """One model whose gradients are averaged."""

    joinable: _Joinable

    def __init__(self, model: nn.Module, context: Context) -> None:
        options: ReplicateOptions = context.options
        siblings = ReducedGradients.reducers_of(context)
        # The buckets of two models may be sent in another order on each rank, where ranks use different parts of them.
        is_first = not any(sibling.trains for sibling in siblings())
        group = context.mesh.gradient_group if is_first else context.mesh.another_gradient_group()
        hook = None
        bucket_cap_mb = options.bucket_cap_mb
        if options.comm_hook != "none":
            hook = hook_of(options.comm_hook, options.comm_wrapper, group, options.comm_state)
            if options.comm_hook == "power_sgd" and context.device.type == "cpu":
                # PowerSGD waits for communication inside its callbacks. With more than one bucket it deadlocks on gloo's two
                # threads, so the cap is larger than any model.
                bucket_cap_mb = 1 << 14
        reducer = Reducer(
            model,
            Means(group, bucket_cap_mb, context.device, hook),
            broadcast_buffers=options.broadcast_buffers,
            fills_unused=options.unused == "zeros",
            siblings=siblings,
        )
        super().__init__(model, reducer)
        self._divides_steps = context.plan.layout.shard > 1
        self.joinable = _Joinable(reducer, context.device)

    def compress(self, hook: Hook, state: object) -> None:
        """Lets a communication hook average the gradients from now on. Ranks: all."""
        form = self.reducer.form
        assert isinstance(form, Means)
        form.hook = (hook, state)
        self.reducer.plan_anew()

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets steps on gradients that were not averaged be refused (`step-held`), if optimizer states are divided.

        Each rank would step its part of the parameters by its own gradients, and parameters would no longer fit together.
        """
        if self._divides_steps:
            adapter.refuse(self._refuse_unreduced)
        return []

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        if self.reducer.unfinished:
            raise step_held(optimizer)

    @contextmanager
    def uneven_steps(self) -> Iterator[None]:
        """While it is open, ranks that have run out of batches take part in the reductions of the others."""
        self.reducer.before_reducing = self.joinable.announce
        try:
            with self.reducer.without_buffers():
                yield
        finally:
            self.reducer.before_reducing = None


class _Joinable(Joinable):
    """What torch's `Join` needs to know of a model: a rank without batches reduces with the others, and gives zeros."""

    def __init__(self, reducer: Reducer, device: torch.device) -> None:
        super().__init__()
        self.reducer = reducer
        self._device = device

    def announce(self) -> None:
        """Tells ranks that have run out of batches that a reduction begins here."""
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns what a rank without batches does."""
        return _RankWithoutBatches(self.reducer)

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks whose gradients are averaged."""
        return self.reducer.form.group


class _RankWithoutBatches(JoinHook):
    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def main_hook(self) -> None:
        """Takes part in the reduction of one step."""
        self._reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of one that has taken every step."""
        group = self._reducer.form.group
        rank = torch.tensor([dist.get_rank(group) if is_last_joiner else -1])
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self._reducer.hosts)
        broadcast_tensors(values_of(self._reducer.model), group, int(rank))


STRATEGY = Replicate()
