"""Checks what every plan must obey, whatever its strategies. Pure; each check returns problems, and raises nothing.

run_problems      of the draft, before there is a model: number of processes, precision, accumulation, ZeRO stage
model_problems    of the models under the plan
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.errors import Problem
from paceline.base.parts import extra_with, missing
from paceline.base.registry import points
from paceline.config.settings import PRECISIONS
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.world.layout import AXES, GRADIENT_AXES

GROUP = "paceline.strategies"  # of entry points


def origin(plan: Plan, field: str) -> str:
    """`value (source)` of one field, for the `why` of an error."""
    for decision in plan.decisions:
        if decision.field == field:
            return f"{field}={decision.value} ({decision.where or decision.source})"
    return field


def run_problems(plan: Plan, world_size: int) -> list[Problem]:
    """All problems that show before there is a model."""
    problems: list[Problem] = []

    # The product of the axes is the number of processes.
    needed = plan.layout.size()
    if needed != world_size:
        given = [axis for axis in AXES if getattr(plan.layout, axis) > 1]
        given = given or ["replicate"]
        there_are = "there is" if world_size == 1 else "there are"
        problems.append(
            Problem(
                "plan-size",
                f"the plan needs {needed} processes, but {there_are} {world_size}.",
                why=" x ".join(origin(plan, axis) for axis in given),
                fix=f"start {needed} processes (`--procs {needed}` on one node), or change {' or '.join(given)}",
            )
        )

    precisions = PRECISIONS.names()
    if plan.precision not in precisions:
        what = f"there is no precision called {plan.precision!r}."
        fix = f"use one of {', '.join(precisions)}"
        problems.append(Problem("plan-precision", what, why=origin(plan, "mixed_precision"), fix=fix))

    if not isinstance(plan.accumulate, int) or plan.accumulate < 1:
        what = f"{plan.accumulate!r} micro-batches cannot make an optimizer step."
        fix = "use gradient_accumulation_steps=1 or more"
        problems.append(Problem("plan-accumulate", what, why=origin(plan, "accumulate"), fix=fix))

    # A stage divides something over ranks along `shard` (and `ep`), and ranks along `shard` divide something.
    divides_nothing = plan.zero == 0 and plan.layout.shard > 1
    has_nobody = plan.zero > 0 and plan.layout.size("shard", "ep") == 1 < plan.layout.size()
    if divides_nothing or has_nobody:
        if plan.zero == 0:
            what = f"{plan.layout.shard} ranks share one copy of the model, but divide nothing."
            fix = "set zero to 1, 2 or 3, or leave it out; or use `replicate` instead of `shard`"
        else:
            what = "there is nobody to divide with."
            fix = "leave `shard` out, and it takes all ranks that the other axes leave; or leave `zero` out"
        why = f"{origin(plan, 'zero')}, {origin(plan, 'shard')}"
        problems.append(Problem("plan-zero", what, why=why, fix=fix))
    return problems


def model_problems(plan: Plan, models: Iterable[ModelFacts]) -> list[Problem]:
    """All problems of the models under this plan."""
    problems: list[Problem] = []
    for facts in models:
        # The loss scaler needs float32 weights: gradients held in float16 cannot be unscaled safely.
        if plan.precision == "fp16" and facts.half_names:
            shown = list(facts.half_names[:3])
            if len(facts.half_names) > 3:
                shown.append("...")
            problems.append(
                Problem(
                    "fp16-parameters",
                    f"{facts.name} holds {len(facts.half_names)} trainable parameters in float16 ({', '.join(shown)}).",
                    why=f"{origin(plan, 'mixed_precision')}: the loss scaler can only unscale float32 gradients",
                    fix="call `model.float()` before `prepare`, freeze those parameters, or use mixed_precision='bf16'",
                )
            )
        problems += _absent_parts(plan, facts)
    return problems


def _absent_parts(plan: Plan, facts: ModelFacts) -> Iterable[Problem]:
    """Returns problems with what must be done to a model so that numbers are those of one process, where no part does it."""
    reasons = {}
    if facts.quantised:
        reasons["quantised"] = (
            f"{facts.quantised[0].name} of {facts.name} is kept in few bits ({facts.quantised[0].kind})"
        )
    if facts.balanced and facts.auxiliary_loss and plan.layout.size(*GRADIENT_AXES) > 1:
        reasons["balance"] = (
            f"{facts.name} adds a loss that balances experts over the whole batch: {facts.auxiliary_loss}"
        )
    for name in reasons.keys() - points(GROUP).keys():
        yield from missing(extra_with(GROUP, name), f"the strategy {name} is", reasons[name]).problems
