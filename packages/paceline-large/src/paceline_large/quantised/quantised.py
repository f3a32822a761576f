"""`quantised`: frozen weights in 4 or 8 bits, as QLoRA trains adapters on. They are whole on every rank, under every plan.

    prepare    all ranks get the statistics of the first rank (block maxima, row maxima), which are no parameters or buffers
               bitsandbytes packs no weight for evaluation: a packed one has no gradient, and other numbers
    training   FSDP2 leaves these weights alone: nothing of them is divided, gathered or sent
    loading    `load_state_dict` takes up the statistics, which `state_dict` has written

`tp` and `pp` are refused. Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023.
"""

from __future__ import annotations

from paceline.base.errors import Problem
from paceline.parallel.strategy import Strategy
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin


class QuantisedWeights(Strategy):
    """Weights that bitsandbytes or torchao keep in few bits."""

    name = "quantised"
    stage = 5
    applied = "paceline_large.quantised.quantised_applied"

    def wanted(self, plan: Plan) -> bool:
        """Wanted by every plan, also on one process: there, too, evaluation must not pack the weights."""
        return True

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses axes that would divide layers, and weights that are trained where parameters are divided."""
        if not facts.quantised:
            return []
        problems = []
        first = facts.quantised[0]
        for axis in ("tp", "pp"):
            if plan.layout.size(axis) == 1:
                continue
            problems.append(
                Problem(
                    "quantised-axis",
                    f"{facts.name} has quantised layers, which {axis} cannot divide.",
                    why=[
                        origin(plan, axis),
                        f"{first.name} is kept in {first.kind} form: its bytes belong to blocks of numbers",
                    ],
                    fix=f"set {axis} to 1, and use the ranks for replicate or shard",
                )
            )
        trained = [row for row in facts.quantised if row.trained]
        if trained and plan.fully_sharded:
            problems.append(
                Problem(
                    "quantised-axis",
                    f"{facts.name} trains a quantised layer, whose parameters cannot be divided.",
                    why=[origin(plan, "zero"), f"{trained[0].name} requires a gradient"],
                    fix="use zero=2, under which parameters are whole; or freeze it and train an adapter",
                )
            )
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says how many weights are quantised, what they hold on each rank, and whether their numbers depend on the width."""
        if not facts.quantised:
            return []
        kinds = dict.fromkeys(row.kind for row in facts.quantised)
        mebibytes = sum(row.bytes for row in facts.quantised) / 2**20
        text = f"{len(facts.quantised)} weights ({', '.join(kinds)}), {mebibytes:.1f} MiB"
        reason = "whole on every rank under every plan, so nothing of them is sent; in evaluation they stay as they are"
        decisions = [Decision(f"quantised({facts.name})", text, "derived", reason=reason)]
        thresholds = sorted({row.batch_threshold for row in facts.quantised if row.batch_threshold})
        if thresholds:
            reason = (
                "in evaluation, and on accelerators in training, a column of an input is computed in 16 bits if any row of the "
                "rank's batch is larger there: the numbers depend on the batch of a rank"
            )
            decisions.append(Decision(f"quantised.threshold({facts.name})", thresholds[0], "derived", reason=reason))
        return decisions


STRATEGY = QuantisedWeights()
