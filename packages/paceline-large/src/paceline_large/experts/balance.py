"""`balance`: the loss that balances experts is that of the whole batch.

It is a product of two means over tokens, and the mean over ranks of what each makes of its own tokens is another number. Of
models that use transformers' function, the sums are those of all ranks (`balance_applied.py`). Any other such loss is named in
the plan.
"""

from __future__ import annotations

from paceline.parallel.strategy import Strategy
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed
from paceline.plan.plan import Decision, Plan
from paceline.world.layout import GRADIENT_AXES


class BalanceLoss(Strategy):
    """The loss that balances experts, over the tokens of all ranks that read different ones."""

    name = "balance"
    stage = 37
    applied = "paceline_large.experts.balance_applied"

    def wanted(self, plan: Plan) -> bool:
        """Wanted where ranks read different samples, or parts of them."""
        return plan.layout.size(*GRADIENT_AXES) > 1

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says over which tokens the loss is computed."""
        field = f"balance({facts.name})"
        ranks = plan.layout.size(*GRADIENT_AXES)
        if facts.balanced:
            reason = f"{listed([name or 'the model itself' for name in facts.balanced])}: "
            reason += "the loss that balances experts is that of the whole batch; it costs one small all-reduce a pass"
            return [Decision(field, f"over {ranks} ranks", "derived", reason=reason)]
        if not facts.auxiliary_loss:
            return []
        reason = (
            f"{facts.auxiliary_loss}: the loss that balances experts is a product of two means. Each rank computes it over "
            "its own tokens, and the mean over ranks is not quite that of the whole batch. Computed in the loop, from "
            "`accelerator.gather(router_logits, with_gradient=True)`, it is"
        )
        return [Decision(field, "of each rank", "derived", reason=reason)]


STRATEGY = BalanceLoss()
