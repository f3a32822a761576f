"""`zero`: ZeRO stages 1 and 2 on the `shard` axis. Optimizer states, at stage 2 also gradients, are divided over the ranks.

    stage 1    `replicate` averages whole gradients; each rank steps its rows, then rows are gathered
    stage 2    gradients are reduced to the rows of each rank during the backward pass, and are DTensors from then on
    step       user's hooks -> the optimizer gets rows in place of parameters -> step -> rows are gathered -> user's hooks

In the model and in the optimizer the parameters are plain, unsharded tensors, so the training loop needs no change. FSDP2
(`shard`) does stage 3, and the lower stages together with tensor or pipeline parallelism.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.base.errors import Problem
from paceline.config.kinds import YES_NO, one_of, positive
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.layout import GRADIENT_AXES


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
    applied = "paceline.parallel.data.zero_applied"
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


STRATEGY = Zero()
