"""`recompute`: activation checkpointing. Activations of blocks are dropped after the forward pass and computed again.

    blocks       every repeated block keeps only its inputs
    K            the first of every K blocks does so; the others keep everything
    selective    blocks keep results that are expensive to compute (products of matrices, attention), and drop the rest

`block.forward` is replaced on the instance, so that the names of parameters stay. Strategies that are applied later
(compile, shard) are outside of it. Strategies that were applied before (tensor, context) run again inside of it, together with
their communication. Random numbers and autocast are the same in both runs, and so are buffers: those that `forward` changes,
such as the statistics of batch norms and the vectors of `spectral_norm`, change once.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (selective).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.base.errors import Problem
from paceline.config.kinds import whole
from paceline.parallel.strategy import Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import names_of, option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
KEPT = (
    *PRODUCTS, "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
# Bytes that a block keeps for each channel and position, of 34 in all (Korthikanti et al., 2022, table 2).
_ALL = 34
_INPUT = 2
_PRODUCTS = 22


@dataclass(frozen=True)
class RecomputeOptions:
    """What is kept."""

    save: str | tuple[str, ...] = option(
        KEPT, None, "With recompute=selective: names in torch.ops.aten of the operations whose results are kept."
    )
    products: int = option(
        1,
        whole(1),
        "With recompute=selective: of so many products of matrices in a block, the result of the first is kept.",
    )


class Recompute(Strategy):
    """Activation checkpointing of the repeated blocks."""

    name = "recompute"
    stage = 40
    applied = "paceline.parallel.recompute_applied"

    Options = RecomputeOptions

    def wanted(self, plan: Plan) -> bool:
        """Used if the plan says which blocks are computed again."""
        return plan.recompute != "no"

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses models without blocks, and names of operations that torch does not have."""
        problems = []
        if not facts.blocks:
            problems.append(
                Problem(
                    "recompute-blocks",
                    f"{facts.name} has no repeated blocks to compute again.",
                    why=f"{origin(plan, 'recompute')}; no ModuleList or Sequential of it holds several modules of one class",
                    fix="set recompute to no, or keep the model's layers in a torch.nn.ModuleList",
                )
            )
        unknown = [name for name in names_of(self.options(plan).save) if not overloads(name)]
        if unknown:
            problems.append(
                Problem(
                    "recompute-operation",
                    f"torch.ops.aten has no {', '.join(unknown)}.",
                    why="options={'recompute': {'save': ...}} names operations whose results are kept",
                    fix="use names such as mm, addmm, bmm, or leave the option out",
                )
            )
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says how many blocks keep which activations."""
        total = len(facts.blocks)
        again = len(chosen(plan.recompute, facts.blocks))
        if plan.recompute == "selective":
            options = self.options(plan)
            reason = f"{total} blocks keep the results of {', '.join(names_of(options.save))}"
            if options.products > 1:
                reason += f"; of {options.products} products, the first"
        else:
            reason = f"{again} of {total} blocks keep their inputs alone"
            if again < total:
                reason += f", {total - again} keep all"
        return [Decision("recompute.blocks", again, "derived", reason=reason)]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts the inputs (or products) of all blocks, and all activations of one block at a time."""
        kept, again = fractions(plan, facts)
        return replace(before, activations=int(before.activations * (kept + again)))


def fractions(plan: Plan, facts: ModelFacts) -> tuple[float, float]:
    """Returns which part of all activations is kept from the forward pass on, and which is computed again at a time."""
    if plan.recompute == "no":
        return 1.0, 0.0
    total = max(1, len(facts.blocks))
    share = len(chosen(plan.recompute, facts.blocks)) / total
    kept_share = _INPUT / _ALL
    if plan.recompute == "selective":
        every = STRATEGY.options(plan).products
        kept_share = (_INPUT + (_PRODUCTS - _INPUT) / every) / _ALL
    # Blocks that keep everything, and what the others keep.
    kept = 1 - share + share * kept_share
    # One block at a time is computed again in full.
    return kept, min(1 - kept, (1 - kept_share) / total)


def chosen(recompute: str, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the blocks that are computed again."""
    if recompute.isdecimal():
        return blocks[:: int(recompute)]
    return blocks


def overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name.removeprefix("aten."), None)
    if packet is None:
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


STRATEGY = Recompute()
