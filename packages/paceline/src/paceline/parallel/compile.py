"""`compile`: `torch.compile` of the repeated blocks, one by one and in place.

Equal blocks share one compilation, which takes a fraction of the time that the whole model would take. Names of parameters
stay (`nn.Module.compile`). Recomputation is inside of the compiled region, shard and replicate are outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.base.errors import Problem
from paceline.base.log import info
from paceline.config.kinds import YES_NO, YES_NO_AUTO, Kind, one_of
from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin


@dataclass(frozen=True)
class CompileOptions:
    """Options of `torch.compile`, under its names."""

    backend: str = option("inductor", Kind("a name", str, "NAME"), "The backend of torch.compile.")
    mode: str = option(
        "default",
        one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "The mode of the backend inductor.",
    )
    fullgraph: bool = option(False, YES_NO, "A block that is not one graph is an error.")
    dynamic: bool | str = option(
        "auto", YES_NO_AUTO, "Compiles for sizes that change from call to call; auto: after a size has changed."
    )


class Compile(Strategy):
    """`torch.compile` of each repeated block, or of the whole model if it has no repeated blocks."""

    name = "compile"
    stage = 50

    Options = CompileOptions

    def wanted(self, plan: Plan) -> bool:
        """Used if the plan says so."""
        return plan.compile

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses tensor parallel blocks, whose compiled backward pass fails, and backend "eager" with recomputation."""
        backend = self.options(plan).backend
        if backend == "eager" and plan.recompute != "no":
            return [
                Problem(
                    "compile-recompute",
                    "with compile's backend 'eager', dropout would drop other elements when a block is computed again.",
                    why=f"{origin(plan, 'recompute')}, options={{'compile': {{'backend': 'eager'}}}}: it does not restore the "
                    "state of the random number generators",
                    fix="use the backend 'aot_eager' or 'inductor'",
                )
            ]
        if plan.layout.tp == 1 or backend == "eager":
            return []
        return [
            Problem(
                "compile-tensor",
                "blocks whose matrices are divided cannot be compiled one by one.",
                why=f"{origin(plan, 'compile')}, {origin(plan, 'tp')}: torch loses the divided gradients of a compiled block",
                fix="leave compile at no",
            )
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says how many regions are compiled."""
        regions = max(1, len(facts.blocks))
        what = "the whole model: nothing in it repeats"
        if facts.blocks:
            what = f"{regions} blocks, one by one"
        return [Decision("compile.regions", regions, "derived", reason=f"{what}; on a CPU seldom faster than eager")]

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Marks the blocks for compilation, which happens at their first call."""
        options = context.options
        how: dict[str, Any] = {"backend": options.backend, "fullgraph": options.fullgraph}
        how["dynamic"] = options.dynamic
        if options.dynamic == "auto":
            how["dynamic"] = None  # torch compiles for the first shape, and for any shape once another one comes
        if options.backend == "inductor":
            how["mode"] = options.mode
        modules = dict(model.named_modules())
        for name in context.facts.blocks or ("",):
            if next(modules[name].parameters(), None) is not None:  # else another rank of a pipeline holds it
                modules[name].compile(**how)
        if context.device.type == "cpu":
            info("parallel", "compile: on a CPU the first steps take many seconds, and later ones are seldom faster")
        return AppliedStrategy(model)


STRATEGY = Compile()
