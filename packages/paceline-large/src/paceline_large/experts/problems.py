"""What keeps experts from being divided over ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.base.errors import Problem
from paceline.plan.experts import Experts
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import joined, listed
from paceline.plan.plan import Plan
from paceline.plan.rules import origin


def problems_of(plan: Plan, facts: ModelFacts) -> list[Problem]:
    """Returns the problems of dividing the experts of a model over the `ep` axis."""
    experts = facts.experts
    problems = []
    if not experts:
        problems.append(
            Problem(
                "experts-none",
                f"{facts.name} has no experts to divide.",
                why=f"{origin(plan, 'ep')}; no module has weights [experts, ...] of three dimensions and a forward of tokens, "
                "chosen experts and their weights, and no list called experts has modules that are alike",
                fix="leave `ep` out, or name the modules in the option `experts.modules`",
            )
        )
    for row in experts:
        if row.problem:
            problems.append(
                Problem(
                    "experts-code",
                    f"the {row.number} experts in {row.name} of {facts.name} cannot be divided.",
                    why=row.problem,
                    fix="stack their weights in one module, whose forward takes (tokens, top_k_index, top_k_weights), as "
                    "transformers does, or make each a module of an `nn.ModuleList`; or leave `ep` out",
                )
            )
    return [*problems, *_uneven(plan, facts, experts), *_hooked(facts, experts)]


def _uneven(plan: Plan, facts: ModelFacts, experts: Sequence[Experts]) -> list[Problem]:
    ep = plan.layout.ep
    uneven = [row for row in experts if row.number % ep]
    if not uneven:
        return []
    numbers = sorted({row.number for row in experts})
    fitting = []
    for size in range(1, numbers[0] + 1):
        if all(number % size == 0 for number in numbers):
            fitting.append(str(size))
    return [
        Problem(
            "experts-divide",
            f"{uneven[0].number} experts cannot be divided by ep={ep}.",
            why=f"{origin(plan, 'ep')}; {listed([row.name for row in uneven])} of {facts.name}",
            fix=f"set ep to one of {', '.join(fitting)}",
        )
    ]


def _hooked(facts: ModelFacts, experts: Sequence[Experts]) -> list[Problem]:
    names = {joined(row.name, key) for row in experts for key in row.parameters}
    hooked = [name for name in facts.hooked if name in names]
    if not hooked:
        return []
    return [
        Problem(
            "experts-hooks",
            f"{facts.name} has hooks on gradients of experts.",
            why=f"`register_hook` on {listed(hooked)}; other tensors take the place of these parameters, and the hooks would "
            "never be called",
            fix="register them on the parameters of the prepared model",
        )
    ]
