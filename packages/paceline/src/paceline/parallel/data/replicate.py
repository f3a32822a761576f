"""`replicate`: every rank holds the whole model and gradients are averaged.

`prepare` returns the module that it was given: hooks on its parameters average the gradients while the backward pass runs
(`reducer.py`), whoever has computed the loss, and by whichever method of the model. The same is done beside tensor, context and
pipeline parallelism, on each rank's part of the gradients; in a pipeline at the end of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.base.errors import Problem
from paceline.base.parts import extra_with, missing
from paceline.base.registry import Registry
from paceline.config.kinds import YES_NO, one_of, positive
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Plan
from paceline.world.layout import GRADIENT_AXES

GRADIENT_HOOKS = Registry("paceline.gradient_hooks", "communication hook")
_HOOKS = ("bf16", "fp16", "power_sgd", "batched_power_sgd")


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
    comm_hook: str = option("none", one_of("none", *_HOOKS), "Compresses gradients before they are sent.")
    comm_wrapper: str = option("none", one_of("none", "bf16", "fp16"), "Casts the data that the hook sends.")
    comm_state: Mapping[str, Any] = option({}, None, "Keywords of the hook's state (PowerSGD).")


class Replicate(Strategy):
    """Data parallel over the `replicate` axis (and over `cp`, and over `shard` where only optimizer states are divided)."""

    name = "replicate"
    stage = 90
    applied = "paceline.parallel.data.replicate_applied"
    axes = ("replicate",)
    Options = ReplicateOptions
    averaging = Averaging(
        over="replicate, shard, ep and cp; of experts without ep",
        when="in each backward pass that is not held, bucket by bucket; what is left at its end",
        result="the mean, whole on every rank",
    )

    def wanted(self, plan: Plan) -> bool:
        """Used if several ranks hold whole gradients of the same parameters, and no other strategy averages them."""
        divided = plan.fully_sharded or (plan.layout.shard > 1 and plan.zero == 2)
        return not divided and plan.layout.size(*GRADIENT_AXES) > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses communication hooks of a part that is absent, or together with tensor, pipeline or expert parallelism."""
        hook = self.options(plan).comm_hook
        if hook == "none":
            return []
        problems: list[Problem] = []
        if hook not in GRADIENT_HOOKS.names():
            extra = extra_with(GRADIENT_HOOKS.group, hook)
            problems += missing(extra, f"the communication hook {hook} is", f"replicate.comm_hook={hook}").problems
        if plan.layout.parameter_parts > 1:
            problems.append(
                Problem(
                    "replicate-hook",
                    f"gradients cannot be compressed by {hook!r} under this plan.",
                    why=f"replicate.comm_hook={hook}; {plan.layout}: each rank has parts of them",
                    fix="leave replicate.comm_hook out",
                )
            )
        return problems

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Adds what a ring all-reduce sends: 2 (n - 1) / n of the gradients. The buckets are the gradients themselves."""
        width = plan.layout.size(*GRADIENT_AXES)
        return replace(before, sent=before.sent + 2 * (width - 1) * before.gradients // width)


STRATEGY = Replicate()
