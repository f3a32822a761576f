"""`tensor`: tensor parallelism. The matrices of layers are divided over the `tp` ranks, which compute each sample together.

    check, decide, cost    from a `LayerDivision` (`plan`), which says how each layer is divided; pure
    apply                  parameters become DTensors with rank 0's values; numbers of heads become those of this rank;
                           the forward of the layers computes this rank's share (`styles`)
    first forward          compares the divided modules with the undivided ones (`proof`)

Every parameter becomes a DTensor on the `tp` mesh, also those that stay replicated: so optimizers, clipping and FSDP2 see
parameters of one kind. Gradients of replicated parameters are equal on all ranks, since all ranks compute the same loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.base.errors import Problem
from paceline.parallel.strategy import Averaging, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed, within_some
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline_large.divided_bytes import with_divided
from paceline_large.tensor.options import TensorOptions

if TYPE_CHECKING:
    from paceline_large.tensor.plan import LayerDivision


def experts_over_ep(plan: Plan, facts: ModelFacts) -> list[str]:
    """Returns the FQNs of the experts that `ep` divides. Ranks along `tp` hold the same ones, whole."""
    if plan.layout.ep == 1:
        return []
    return [row.name for row in facts.experts]


def division_of(plan: Plan, facts: ModelFacts, options: TensorOptions) -> LayerDivision:
    """Returns how the layers of a model are divided, without the experts that `ep` divides."""
    # How layers are divided is a subject of its own, which a plan with tp=1 does not load.
    from paceline_large.tensor.plan import divide

    experts = experts_over_ep(plan, facts)
    layers = tuple(layer for layer in facts.layers if not within_some(layer.name, experts))
    return divide(replace(facts, layers=layers), plan.layout.tp, options)


class Tensor(Strategy):
    """Tensor parallel over the `tp` axis."""

    name = "tensor"
    stage = 20
    applied = "paceline_large.tensor.tensor_applied"
    axes = ("tp",)
    Options = TensorOptions
    averaging = Averaging(
        over="tp",
        when="in the backward pass, by DTensor, where a layer needs it",
        result="the rank's part, or a part of a sum that DTensor adds up when it is used",
    )
    replaces_parameters = True
    divides_steps = True

    def _division(self, plan: Plan, facts: ModelFacts) -> LayerDivision:
        return division_of(plan, facts, self.options(plan))

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses heads and widths that do not divide, patterns and styles that do not fit, and unknown models.

        Also hooks and sparse gradients of parameters, all of which become DTensors.
        """
        problems = list(self._division(plan, facts).problems)
        if plan.layout.cp > 1 and self.options(plan).sequence:
            problems.append(
                Problem(
                    "context-sequence",
                    "context and tensor parallelism would divide the same positions.",
                    why=f"{origin(plan, 'cp')}, {origin(plan, 'tp')} with options={{'tensor': {{'sequence': True}}}}",
                    fix="remove the option `sequence`: cp divides activations already",
                )
            )
        if facts.hooked:
            problems.append(
                Problem(
                    "tensor-hooks",
                    f"{facts.name} has hooks on gradients of its parameters.",
                    why=f"`register_hook` or `register_post_accumulate_grad_hook` on {listed(facts.hooked)}; other tensors "
                    "take the place of these parameters, and the hooks would never be called",
                    fix="register them on the parameters of the prepared model, or change `p.grad` after "
                    "`accelerator.backward(loss)`",
                )
            )
        if facts.sparse:
            problems.append(
                Problem(
                    "tensor-sparse",
                    f"{facts.name} has an embedding with sparse gradients.",
                    why="sparse=True: a DTensor, which each parameter becomes, takes no gradient that is a list of rows",
                    fix="build it with sparse=False",
                )
            )
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says who chose the division, how many layers are divided in which way, and what stays whole."""
        division = self._division(plan, facts)
        sources = {
            "table": "options.tensor.plan",
            "model": f"{facts.name} says how itself",
            "derived": f"by names and shapes in the {len(facts.blocks)} repeated blocks of {facts.name}",
        }
        counts = Counter(style for style in division.styles.values() if style != "replicated")
        layers = ", ".join(f"{count} {style}" for style, count in sorted(counts.items()))
        decisions = [Decision("tensor.layers", layers or "none", "derived", reason=sources[division.source])]
        reasons: dict[str, list[str]] = {}
        for name, reason in division.whole.items():
            reasons.setdefault(reason, []).append(name)
        # The layers of a group are divided even if the group computes the code between them on all features.
        modules_of_groups = {group.module for group in division.groups}
        for reason, names in reasons.items():
            field = "tensor.left_whole"
            if names[0] in modules_of_groups:
                field = "tensor.computed_whole"
            shown = names[0]
            if len(names) > 1:
                shown += f" and {len(names) - 1} more"
            decisions.append(Decision(field, shown, "derived", reason=reason))
        return decisions

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts one part of each divided parameter. What is sent depends on the tokens of a batch, and is not counted."""
        from paceline_large.tensor.plan import divided_elements

        return with_divided(before, divided_elements(self._division(plan, facts), facts), facts, plan.layout.tp)


STRATEGY = Tensor()
