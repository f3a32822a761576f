"""`batch_norm`: batch norms use the statistics of the global batch of all data-parallel ranks, as on one process.

    forward    count, mean and variance of this rank's rows -> one all-reduce -> mean and variance of the global batch
    backward   two sums for each channel over this rank's rows -> one all-reduce -> gradients of the global statistics

The modules keep their class and their own `forward` (momentum, counters, checks, an activation that a subclass adds). Only
its call of `torch.nn.functional.batch_norm` is replaced. A copy of the model, and a model that is loaded from a file, has
ordinary layers. In evaluation nothing communicates. While torch's `update_bn` runs over a prepared loader, the layers of its
model, which is an average of weights, are synchronised too.

Layers that a script has converted to `nn.SyncBatchNorm` are synchronized here on the CPU (`converted_batch_norm.py`), and by
torch on an accelerator.

Source of the backward pass: Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.base.errors import Problem
from paceline.config.kinds import one_of
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.layout import DATA_AXES


@dataclass(frozen=True)
class BatchNormOptions:
    """Over which samples statistics are taken."""

    statistics: str = option(
        "synced",
        one_of("synced", "local"),
        "Samples of the statistics: the batch of all data-parallel ranks, as on one process, or the part of each rank.",
    )


class BatchNorm(Strategy):
    """Statistics of batch norms over the ranks that read different samples."""

    name = "batch_norm"
    stage = 35
    applied = "paceline.parallel.data.batch_norm_applied"

    Options = BatchNormOptions
    averaging = Averaging(
        over="replicate and shard: gradients that flow through the statistics",
        when="in the backward pass of the layer",
        result="those of whole batches; `replicate` or `shard` averages them",
    )

    def wanted(self, plan: Plan) -> bool:
        """Wanted on several ranks."""
        return plan.layout.size() > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses batch norms in blocks that `cp` divides: they would see only a part of the positions."""
        inside = tuple(f"{block}." for block in facts.blocks)
        divided = [name for name in facts.batch_norms if name.startswith(inside)]
        if plan.layout.cp == 1 or not divided or self.options(plan).statistics == "local":
            return []
        return [
            Problem(
                "batch-norm-sequence",
                f"{divided[0]} normalises over positions that other ranks hold.",
                why=f"{origin(plan, 'cp')} divides sequences inside the repeated blocks, and this batch norm is in one",
                fix="set cp to 1, use nn.LayerNorm there, or accept other numbers with "
                "options={'batch_norm': {'statistics': 'local'}}",
            )
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says which samples the statistics are computed from, and what that costs or changes."""
        width = plan.layout.size(*DATA_AXES)
        if width == 1 or not facts.batch_norms:
            return []
        layers = f"{len(facts.batch_norms)} layer{'s' * (len(facts.batch_norms) > 1)} ({listed(facts.batch_norms)})"
        statistics = self.options(plan).statistics
        if statistics == "local":
            reason = f"{layers} normalised by each rank's part of the batch: other numbers than on one process"
        else:
            reason = (
                f"{layers} normalised by the batch of all {width} data-parallel ranks, as on one process; it costs one small "
                "all-reduce per layer in each forward and each backward pass; `--option batch_norm.statistics=local` "
                "takes each rank's own"
            )
        where = ""
        for decision in plan.decisions:
            if decision.field == "options.batch_norm.statistics":
                where = decision.where
                break
        return [Decision("batch_norm.statistics", statistics, "derived", where, reason)]


STRATEGY = BatchNorm()
