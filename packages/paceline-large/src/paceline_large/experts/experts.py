"""`experts`: expert parallelism. Ranks along `ep` divide the experts of each layer, and read different samples.

    check, decide, cost    from `ModelFacts.experts`; pure
    apply                  weights of experts become DTensors, `Shard(0)` on the `ep` mesh, with the values of its first rank
    forward                tokens travel to the ranks of their experts, whose own code computes them, and back (`travel`)
    backward               gradients travel the same way; an expert's gradient is the mean over `ep`, as if each rank had it

Everything else of the model, routers and shared experts too, is whole on each rank, as in data parallelism. So an expert's
gradient is left to be averaged over the other data axes alone: by `replicate`, or by `shard`, which divides it further.

Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base.errors import Problem
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline_large.divided_bytes import with_divided


@dataclass(frozen=True)
class ExpertOptions:
    """Which modules are experts."""

    modules: str | Sequence[str] = option(
        (),
        None,
        "Name patterns of the modules that hold experts; empty: those found by their structure and their names. A pattern that "
        "matches none of these declares a list of modules.",
    )


class ExpertParallel(Strategy):
    """Divides the experts over the `ep` axis."""

    name = "experts"
    stage = 25
    axes = ("ep",)
    Options = ExpertOptions
    applied = "paceline_large.experts.experts_applied"
    replaces_parameters = True
    divides_steps = True
    averaging = Averaging(
        over="ep, of experts alone",
        when="in the backward pass, with the gradients of the tokens",
        result="the mean of the rank's own experts, a DTensor; the other axes are left to `replicate` or `shard`",
    )

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses models without experts, numbers that do not divide, code that cannot send tokens, and other axes."""
        # A plan without ep does not load it.
        from paceline_large.experts.problems import problems_of

        return problems_of(plan, facts)

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says which experts are divided, and whether the tokens that they drop depend on the number of ranks."""
        experts = facts.experts
        ep = plan.layout.ep
        number = experts[0].number
        reason = f"{len(experts)} layers of {facts.name} with {number} experts, {number // ep} on each rank"
        decisions = [Decision("experts.layers", listed([row.name for row in experts]), "derived", reason=reason)]
        limited = sorted({row.capacity for row in experts if row.capacity})
        if limited:
            reason = (
                f"{', '.join(limited)}: each rank drops tokens by its own samples, and results depend on their number"
            )
            decisions.append(Decision("experts.capacity", "of each rank", "derived", reason=reason))
        return decisions

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts the experts of one rank. What is sent depends on the tokens of a batch, and is not counted."""
        return with_divided(before, facts.elements_of(facts.experts), facts, plan.layout.ep)


STRATEGY = ExpertParallel()
