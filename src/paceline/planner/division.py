"""What a run says of itself when it starts: how its model is divided over the ranks, and what one rank holds then."""

from __future__ import annotations

from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.planner.estimate import Need, estimate

_BY_STAGE = {
    1: "optimizer states",
    2: "gradients and optimizer states",
    3: "parameters, gradients and optimizer states",
}
_BY_AXIS = {"tp": "the matrices of each layer", "cp": "each sequence", "pp": "the layers"}


def division_of(plan: Plan, facts: ModelFacts) -> str:
    """One line about one model; "" where every rank holds all of it and computes whole samples.

    Args:
        plan: resolved.
        facts: of the model.
    """
    layout = plan.layout
    parts = []
    if layout.shard > 1:
        # FSDP2 divides parameters whatever the stage, and over ranks along cp too, which hold the same ones.
        stage = 3 if plan.fully_sharded else plan.zero
        ranks = layout.size("shard", "cp") if plan.fully_sharded else layout.shard
        parts.append(f"zero={plan.zero} divides {_BY_STAGE[stage]} over {ranks} ranks")
    for axis, divided in _BY_AXIS.items():
        size = getattr(layout, axis)
        if size > 1:
            parts.append(f"{axis}={size} divides {divided} over {size} ranks")
    if not parts or not facts.trainable:
        return ""
    held = estimate(plan, Need((facts,)))
    at_rest = (held.parameters + held.gradients + held.optimizer) / facts.parameters
    return (
        f"{facts.name} ({_count(facts.parameters)} parameters): {', '.join(parts)}; about {at_rest:.1f} bytes a parameter on "
        "each, with Adam and without activations. `accelerator.plan.explain()` says more."
    )


def _count(number: int) -> str:
    """A number of parameters for people."""
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
