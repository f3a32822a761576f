"""`offload`: optimizer states stay in host memory, and the optimizer steps on the CPU.

    step    user's hooks -> parameters and gradients (under `zero`, this rank's rows of them) are copied to the host
            -> the optimizer steps there -> parameters are copied back -> user's hooks

If the device is the CPU, nothing is moved. FSDP2 itself offloads the parameters that it shards (`shard`).

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config.kinds import YES_NO
from paceline.parallel.strategy import Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the offload of optimizer states."""

    pin_memory: bool = option(True, YES_NO, "Copies use page-locked memory, which is faster and cannot be swapped.")
    always: bool = option(False, YES_NO, "Copies even if the device is the host, which has no use except in tests.")


class Offload(Strategy):
    """Optimizer states on the host."""

    name = "offload"
    stage = 70  # `bind` runs from the last stage to the first, so this copies the rows that `zero` steps
    applied = "paceline.parallel.offload_applied"

    Options = OffloadOptions

    def wanted(self, plan: Plan) -> bool:
        """Used unless FSDP2 offloads."""
        return plan.offload != "no" and not plan.fully_sharded

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says that unsharded parameters stay on the device, also if the plan asks to offload all."""
        if plan.offload != "all":
            return []
        reason = "parameters and gradients are whole on the device; only FSDP2 (zero=3, shard > 1) takes them off it"
        return [Decision("offload.moves", "optimizer states", "derived", reason=reason)]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts no optimizer states, since a plan counts the memory of the device."""
        return replace(before, optimizer=0)


STRATEGY = Offload()
