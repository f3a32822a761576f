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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.base.errors import Problem
from paceline.parallel.context.block_calls import CACHES
from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import names_of, option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.forward import override_forward

KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
# Bytes that a block keeps for each channel and position, of 34 in all (Korthikanti et al., 2022, table 2).
_ALL = 34
_INPUT = 2
_PRODUCTS = 22
_LARGEST_THAT_CHANGES = 2**16  # elements
_RAN_BEFORE = "_recomputed_before"  # an attribute of a block


@dataclass(frozen=True)
class RecomputeOptions:
    """What is kept."""

    save: str | tuple[str, ...] = option(
        KEPT,
        None,
        "With recompute=selective: names in torch.ops.aten of the operations whose results are kept.",
    )


class Recompute(Strategy):
    """Activation checkpointing of the repeated blocks."""

    name = "recompute"
    stage = 40

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
        unknown = [name for name in names_of(self.options(plan).save) if not _overloads(name)]
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
            reason = f"{total} blocks keep the results of {', '.join(names_of(self.options(plan).save))}"
        else:
            reason = f"{again} of {total} blocks keep their inputs alone"
            if again < total:
                reason += f", {total - again} keep all"
        return [Decision("recompute.blocks", again, "derived", reason=reason)]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Counts the inputs (or products) of all blocks, and all activations of one block at a time."""
        total = max(1, len(facts.blocks))
        share = len(chosen(plan.recompute, facts.blocks)) / total
        kept_share = _INPUT / _ALL
        if plan.recompute == "selective":
            kept_share = _PRODUCTS / _ALL
        # Blocks that keep everything, what the others keep, and one block at a time that is computed again in full.
        fraction = min(1.0, 1 - share + share * kept_share + (1 - kept_share) / total)
        return replace(before, activations=int(before.activations * fraction))

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Replaces `forward` of the blocks that this rank holds."""
        modules = dict(model.named_modules())
        how: dict[str, Any] = {"use_reentrant": False}
        if context.plan.recompute == "selective":
            saved: list[Any] = []
            for name in names_of(context.options.save):
                saved += _overloads(name)
            how["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
        for name in chosen(context.plan.recompute, context.facts.blocks):
            if next(modules[name].parameters(), None) is not None:  # else another rank of a pipeline holds it
                _override(modules[name], how)
        return AppliedStrategy(model)


def chosen(recompute: str, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the blocks that are computed again."""
    if recompute.isdecimal():
        return blocks[:: int(recompute)]
    return blocks


def _override(block: nn.Module, how: dict[str, Any]) -> None:
    def forward(block: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        # The block gets no cache of keys and values, which it would fill twice.
        keywords: dict[str, Any] = dict(kwargs)
        for name in keywords.keys() & set(CACHES):
            keywords[name] = None
        # The first call is not selective. Modules may do something in their first call only, such as building a table. The
        # operations of both runs must be the same, since selective checkpointing matches them by their order.
        if vars(block)[_RAN_BEFORE]:
            keywords |= how
        else:
            keywords["use_reentrant"] = False
        vars(block)[_RAN_BEFORE] = True
        # A compiled block changes its buffers once in any case.
        if not torch.compiler.is_compiling() and next(block.buffers(), None) is not None:
            keywords["context_fn"] = partial(_contexts, block, keywords.get("context_fn"))
        return checkpoint(original, *args, **keywords)

    vars(block)[_RAN_BEFORE] = "context_fn" not in how
    override_forward(block, "recompute", forward)


def _contexts(
    block: nn.Module, others: Callable[[], tuple[Any, Any]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the first and of the second forward pass; `others` returns those that go inside."""
    first, second = others() if others is not None else (nullcontext(), nullcontext())
    before = {}
    for buffer in block.buffers():
        # Masks and tables of positions are large, and do not change.
        if not is_lazy(buffer) and buffer.numel() <= _LARGEST_THAT_CHANGES:
            before[id(buffer)] = (buffer, buffer.clone())
    return first, _second_pass(block, before, second)


@contextmanager
def _second_pass(
    block: nn.Module, before: dict[int, tuple[Tensor, Tensor]], inside: AbstractContextManager[Any]
) -> Iterator[None]:
    """Gives the block other buffers, with the values that the first forward pass has found, and afterwards its own again.

    Args:
        block: what is computed again.
        before: the buffers that the first pass has found, by their `id`, each with a copy of its values.
        inside: a context of the second pass.
    """
    own: list[tuple[nn.Module, str, Tensor]] = []
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                own.append((module, name, buffer))
    for module, name, buffer in own:
        # One that was not copied before, and buffers that are shared by modules stay so.
        _, values = before.get(id(buffer)) or before.setdefault(id(buffer), (buffer, buffer.clone()))
        module._buffers[name] = values
    try:
        with inside:
            yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name.removeprefix("aten."), None)
    if packet is None:
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


STRATEGY = Recompute()
