"""`offload`: optimizer states stay in host memory or on disk, and the optimizer steps on the CPU; activations wait there.

    forward, backward    see `activation_copies`
    step    user's hooks -> parameters and gradients (under `zero`, this rank's rows of them) are copied to the host
            -> the optimizer steps there -> parameters are copied back -> user's hooks

If the device is the CPU, nothing is moved, but to a disk (`states_on_disk`, `parameters_on_disk`). FSDP2 itself offloads the
parameters that it shards to the host's memory (`shard`).

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.base.errors import Problem
from paceline.config.kinds import YES_NO, positive
from paceline.parallel.recompute import fractions
from paceline.parallel.strategy import Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.planner.estimate import Need, estimate, gib


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the offload of optimizer states and of activations."""

    pin_memory: bool = option(True, YES_NO, "Copies use page-locked memory, which is faster and cannot be swapped.")
    part_mb: float = option(
        256,
        positive(),
        "States on disk: MiB of parameters that are stepped together; three times their states are in memory.",
    )
    always: bool = option(False, YES_NO, "Copies even if the device is the host, which has no use except in tests.")


def moves_states(plan: Plan) -> bool:
    """Returns whether this strategy keeps the states of optimizers; FSDP2 moves them with the parameters that it divides."""
    return plan.offloads_states and (not plan.fully_sharded or bool(plan.disk_folder))


def parameters_on_disk(plan: Plan) -> bool:
    """Returns whether shards of parameters are on disk."""
    return plan.offloads_parameters and bool(plan.disk_folder)


class Offload(Strategy):
    """Optimizer states and activations on the host."""

    name = "offload"
    stage = 70  # `bind` runs from the last stage to the first, so this copies the rows that `zero` steps
    applied = "paceline_large.offload.offload_applied"

    Options = OffloadOptions

    def wanted(self, plan: Plan) -> bool:
        """Used for activations, and for states unless FSDP2 offloads them, which it does with the parameters."""
        return plan.offloads_activations or moves_states(plan)

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses activations of compiled blocks: what these save is chosen by the compiler, in one graph."""
        if not (plan.offloads_activations and plan.compile):
            return []
        return [
            Problem(
                "offload-compile",
                "activations of compiled blocks cannot wait in the host's memory.",
                why=[
                    origin(plan, "offload"),
                    origin(plan, "compile"),
                    "torch.compile leaves hooks on saved tensors out",
                ],
                fix="leave compile at no, or use `--recompute blocks` in place of the offload of activations",
            )
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says what is moved, and that unsharded parameters stay on the device, also if the plan asks to offload all."""
        decisions: list[Decision] = []
        if "all" in plan.offload.partition("=")[0] and not plan.fully_sharded:
            reason = "parameters and gradients are whole on the device; only FSDP2 (zero=3) takes them off it"
            decisions.append(Decision("offload.moves", "optimizer states", "derived", reason=reason))
        if plan.disk_folder:
            on_disk = estimate(plan, Need((facts,))).disk
            reason = f"states of {facts.name} on each rank, with Adam; each step reads and writes them"
            if parameters_on_disk(plan):
                parameters = estimate(plan, Need((facts,), states=0)).disk
                reason = (
                    f"{gib(parameters)} of parameters of {facts.name} on each rank, which passes read too, and its states, "
                    "with Adam; gradients wait in the host's memory"
                )
            decisions.append(Decision("offload.disk", gib(on_disk), "derived", reason=reason))
        if plan.offloads_activations:
            num_blocks = max(1, len(facts.blocks))
            reason = (
                f"what {num_blocks} block{'s' if num_blocks > 1 else ''} save for the backward pass waits on the host, and "
                "about two blocks of it are on the device; on a CPU nothing is moved, since it is there already"
            )
            decisions.append(Decision("offload.activations", num_blocks, "derived", reason=reason))
        return decisions

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts what stays on the device: no optimizer states, and of activations those of two blocks."""
        # `shard` counts what FSDP2 keeps on the host, and parameters on disk.
        after = before
        if moves_states(plan):
            # Gradients are copied to the host, and parameters back; but those that FSDP2 keeps there stay.
            stepped = 0
            if not plan.offloads_parameters:
                stepped = facts.trainable_bytes // (plan.layout.shard * plan.layout.parameter_parts)
            after = replace(
                after,
                optimizer=0,
                host=after.host + 2 * stepped,
                host_traffic=after.host_traffic + 2 * stepped,
            )
            if plan.disk_folder:
                disk_traffic = after.disk_traffic + 2 * before.optimizer
                after = replace(after, disk=after.disk + before.optimizer, disk_traffic=disk_traffic)
            else:
                after = replace(after, host=after.host + before.optimizer)
        if plan.offloads_activations:
            # `recompute`, which comes before, has counted what is kept and the block that is computed again.
            kept, again = fractions(plan, facts)
            num_blocks = max(1, len(facts.blocks))
            kept_on_device = kept * min(1.0, _BLOCKS_ON_DEVICE / num_blocks)
            activations = int(before.activations * (kept_on_device + again) / (kept + again))
            moved = before.activations - activations
            host_traffic = after.host_traffic + 2 * plan.accumulate * moved
            after = replace(after, activations=activations, host=after.host + moved, host_traffic=host_traffic)
        return after


# The block whose backward pass runs, and the one before it, whose activations are fetched meanwhile.
_BLOCKS_ON_DEVICE = 2

STRATEGY = Offload()
