"""`batch_layers`: other layers that depend on the whole batch, or change by it, do so over the batches of all ranks.

    Embedding, EmbeddingBag with max_norm      the rows that ANY rank looks up are renormalised, on all ranks, before the lookup
    the same with scale_grad_by_freq           counts how often a row is looked up on all ranks
    InstanceNorm with track_running_stats      running statistics are means over the samples of all ranks

Each costs one small all-reduce in each training pass. In evaluation nothing communicates, so one rank may evaluate alone: there
the rows of an embedding that are too long are shortened in the output, and the weight is left as it is.

Everything works by `Peers`, as in `batch_norm.py`.
"""

from __future__ import annotations

from paceline.base.errors import Problem
from paceline.parallel.strategy import Strategy
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.layout import GRADIENT_AXES


class BatchLayers(Strategy):
    """Layers other than batch norms that depend on the samples of the ranks that read different ones."""

    name = "batch_layers"
    stage = 36
    applied = "paceline.parallel.data.batch_layers_applied"

    def wanted(self, plan: Plan) -> bool:
        """Wanted where ranks read different samples, or parts of them."""
        return plan.layout.size(*GRADIENT_AXES) > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses such layers in blocks that `cp` divides, as batch norms are refused."""
        inside = tuple(f"{block}." for block in facts.blocks)
        divided = [name for name, _ in facts.batch_layers if name.startswith(inside)]
        if plan.layout.cp == 1 or not divided:
            return []
        return [
            Problem(
                "batch-norm-sequence",
                f"{divided[0]} depends on positions that other ranks hold.",
                why=f"{origin(plan, 'cp')} divides sequences inside the repeated blocks, and this layer is in one",
                fix="set cp to 1",
            )
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Names the layers."""
        ranks = plan.layout.size(*GRADIENT_AXES)
        if ranks == 1 or not facts.batch_layers:
            return []
        shown = [f"{name or 'the model itself'} ({kind})" for name, kind in facts.batch_layers]
        text = ", ".join(shown[:3])
        if len(shown) > 3:
            text += f" and {len(shown) - 3} more"
        batch = "the batch"
        if plan.layout.pp > 1:
            batch = "the micro-batch"
        reason = (
            f"over {batch} of all {ranks} data-parallel ranks, as on one process; it costs one small "
            "all-reduce per layer in each forward pass"
        )
        return [Decision(f"batch_layers({facts.name})", text, "derived", reason=reason)]


STRATEGY = BatchLayers()
