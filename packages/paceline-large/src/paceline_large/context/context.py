"""`context`: context parallelism. Each rank along `cp` computes the repeated blocks for its part of every sequence.

    before the blocks     every rank has the whole sequence (embeddings)
    first block           divides hidden states, and all arguments that run along the sequence      `sequence_split`
    each block            its attention reads the positions of the other ranks                      `attention_calls`
    last block            gathers hidden states: head and loss see the whole sequence

    pre-hook -> [recompute] -> our forward -> the user's forward         the region is passed as a keyword argument, so that a
                                                                         block that is computed again gets the same one

Each block is run once on a short part of the first sequence, divided and whole. If it mixes positions in another way than by
attention (a convolution, attention by hand, positions that it counts itself), the results differ, and that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.base.errors import Problem
from paceline.config.kinds import YES_NO, Kind, one_of, whole
from paceline.parallel.strategy import Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import within_some
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin

_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")


@dataclass(frozen=True)
class ContextOptions:
    """How sequences are divided."""

    method: str = option(
        "auto",
        one_of("auto", "ring", "ulysses"),
        "ring passes keys and values from rank to rank; ulysses exchanges positions for heads, whose number cp must divide.",
    )
    dim: int = option(1, whole(0, maximum=1), "Dimension of hidden states that is the sequence: 1 is [B, S, D].")
    blocks: str = option("auto", Kind("a pattern of names", str, "PATTERN"), "Names of the blocks, such as layers.*")
    trial: bool = option(True, YES_NO, "Tests each block once on a short sequence, divided and whole.")


class ContextParallel(Strategy):
    """Divides sequences over the `cp` axis, inside the repeated blocks."""

    name = "context"
    stage = 30
    applied = "paceline_large.context.context_applied"
    axes = ("cp",)
    Options = ContextOptions

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses a model without blocks, heads that do not divide, and settings that do not work together with `cp`."""
        options = self.options(plan)
        cp = plan.layout.cp
        problems = []
        if options.blocks == "auto" and not facts.blocks:
            problems.append(
                Problem(
                    "context-blocks",
                    f"{facts.name} has no repeated blocks in which sequences could be divided.",
                    why=f"{origin(plan, 'cp')}; no ModuleList or Sequential of it holds several modules of one class",
                    fix="name the blocks with options={'context': {'blocks': 'layers.*'}}, or set cp to 1",
                )
            )
        numbers_of_heads: list[int] = []
        if options.method == "ulysses":
            numbers_of_heads = sorted(_heads(facts))
        by = f"cp={cp}"
        if plan.layout.tp > 1:
            by += f" x tp={plan.layout.tp}"
        for heads in numbers_of_heads:
            # Ulysses divides the heads that tensor parallelism has left on a rank.
            if heads % (cp * plan.layout.tp):
                problems.append(
                    Problem(
                        "context-heads",
                        f"{heads} attention heads of {facts.name} cannot be divided by {by}.",
                        why=f"method=ulysses gives each rank whole heads; {fitting(heads)} divide {heads}",
                        fix="set options={'context': {'method': 'ring'}}, which divides any number of heads",
                    )
                )
        if plan.compile:
            problems.append(
                Problem(
                    "context-compile",
                    "blocks that communicate about their sequence cannot be compiled.",
                    why=f"{origin(plan, 'cp')}, {origin(plan, 'compile')}",
                    fix="set compile to no",
                )
            )
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Names the method, if the user has not chosen it."""
        if self.options(plan).method != "auto":
            return []
        return [Decision("context.method", *chosen_method(plan, facts))]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Divides activations, and adds what attention sends.

        Keys and values take about 4 of the 34 bytes that a block keeps for each channel and position (Korthikanti et al.,
        2022). A ring sends them in the forward and in the backward pass, and their gradients. The all-to-all of Ulysses sends
        each of the four matrices of attention twice.
        """
        cp = plan.layout.cp
        activations = before.activations // cp
        keys_and_values = activations * 4 // 34
        method = self.options(plan).method
        if method == "auto":
            method = chosen_method(plan, facts)[0]
        if method == "ring":
            sent = 3 * (cp - 1) * keys_and_values
        else:
            sent = 4 * (cp - 1) * keys_and_values // cp
        return replace(before, activations=activations, sent=before.sent + sent)


def fitting(heads: int) -> str:
    """Returns the numbers of ranks that divide `heads`, as text."""
    widths = [str(width) for width in range(1, heads + 1) if heads % width == 0]
    return ", ".join(widths)


def chosen_method(plan: Plan, facts: ModelFacts) -> tuple[str, str, str, str]:
    """Returns the method for `auto`, as value, source, place and reason of a decision."""
    # Ulysses gives each rank whole heads, and tensor parallelism has divided the heads before.
    ranks = plan.layout.cp * plan.layout.tp
    heads = sorted(_heads(facts))
    numbers = ", ".join(map(str, heads))
    if not heads:
        return "ring", "derived", "", "works for any number of heads"
    if any(number % ranks for number in heads):
        return "ring", "derived", "", f"of {numbers} heads {ranks} is no divisor"
    return "ulysses", "derived", "", f"{numbers} heads are divided by {ranks}: one exchange before and after attention"


def _heads(facts: ModelFacts) -> set[int]:
    """Returns the numbers of attention heads that attributes of modules inside the blocks name."""
    heads: set[int] = set()
    for layer in facts.layers:
        if not within_some(layer.name, facts.blocks):
            continue
        for key, number in layer.numbers:
            if key in _HEADS:
                heads.add(number)
    return heads


STRATEGY = ContextParallel()
