"""`context`: each rank of the `cp` axis computes the repeated blocks for its part of every sequence.

    before the blocks     every rank has the whole sequence (embeddings)
    first block           hidden states and all that runs along the sequence with them are divided   `sequence_split`
    each block            its attention reaches the other ranks' positions                           `attention_calls`
    last block            hidden states are whole again: head and loss see the whole sequence

    pre-hook -> [recompute] -> our forward -> the user's forward         the region travels in the call's keywords, so that
                                                                         a block computed again finds its own

Each block is tried once on a short piece of the first sequence, divided and whole: whatever else mixes positions (a
convolution, attention by hand, positions that a block counts itself) would be wrong without a word, and is an error.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import PlanError, Problem, TrainError
from paceline.config.kinds import YES_NO, Kind, one_of, whole
from paceline.parallel.context.block_calls import REGION, BlockCall, divide_attention
from paceline.parallel.context.sequence_split import Division, Region, Sizes, sequence_dim
from paceline.parallel.context.trial import no_sequence, try_block
from paceline.parallel.context.ulysses import fitting
from paceline.parallel.random_streams import RandomStreams
from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.parallel.tensor.tensor import STRATEGY as TENSOR
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import parent, within_some
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.tree import Tree, map_tensors

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
    axes = ("cp",)
    Options = ContextOptions

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """There are blocks, and their heads divide where they must."""
        options = self.options(plan)
        cp = plan.layout.cp
        problems = []
        if options.blocks == "auto" and not facts.blocks:
            problems.append(
                Problem(
                    "context-blocks",
                    f"{facts.name} has no repeated blocks, between which sequences could be divided.",
                    why=f"{origin(plan, 'cp')}; no ModuleList or Sequential of it holds several modules of one class",
                    fix="name the blocks with options={'context': {'blocks': 'layers.*'}}, or set cp to 1",
                )
            )
        for heads in sorted(_heads(facts)) if options.method == "ulysses" else ():
            if heads % (cp * plan.layout.tp):
                by = f"cp={cp}" + (f" x tp={plan.layout.tp}" if plan.layout.tp > 1 else "")
                problems.append(
                    Problem(
                        "context-heads",
                        f"{heads} attention heads of {facts.name} cannot be divided by {by}.",
                        why=f"method=ulysses gives each rank whole heads; {fitting(heads)} divide {heads}",
                        fix="set options={'context': {'method': 'ring'}}, which divides any number of heads",
                    )
                )
        if plan.layout.tp > 1 and TENSOR.options(plan).sequence:
            problems.append(
                Problem(
                    "context-sequence",
                    "two strategies would divide the same positions.",
                    why=f"{origin(plan, 'cp')}, {origin(plan, 'tp')} with options={{'tensor': {{'sequence': True}}}}",
                    fix="leave the option `sequence` out: cp divides activations already",
                )
            )
        if plan.compile:
            problems.append(
                Problem(
                    "context-compile",
                    "blocks that talk to other ranks about their sequence are not compiled.",
                    why=f"{origin(plan, 'cp')}, {origin(plan, 'compile')}",
                    fix="leave compile at no",
                )
            )
        return problems

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """The method, where it was left open."""
        if self.options(plan).method != "auto":
            return []
        return [Decision("context.method", *_method(plan, facts))]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Activations are divided; keys and values are about 4 of the 34 bytes a block keeps for each channel and position
        (Korthikanti et al., 2022). Round a ring go they, they again, and their gradients; by all-to-all goes each of the
        four matrices of attention twice."""
        cp = plan.layout.cp
        activations = before.activations // cp
        keys_and_values = activations * 4 // 34
        method = self.options(plan).method
        if method == "auto":
            method = _method(plan, facts)[0]
        if method == "ring":
            sent = 3 * (cp - 1) * keys_and_values
        else:
            sent = 4 * (cp - 1) * keys_and_values // cp
        return replace(before, activations=activations, sent=before.sent + sent)

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Hooks the blocks; the model stays the object that it was.

        Raises:
            PlanError: `context-blocks`, where the pattern names none.
        """
        options = context.options
        group = context.mesh.group("cp")
        streams = RandomStreams(dist.get_rank(group), context.device)
        streams.share(group)
        method = options.method
        if method == "auto":
            method = _method(context.plan, context.facts)[0]
        begins: set[str] = set()
        if context.runner is not None:
            begins = set(context.runner.first_blocks)
        spans = _spans(model, options.blocks, context.facts.blocks, begins)
        # A stage of a pipeline may hold no block that the pattern names.
        if not spans and not begins:
            example = "layers.*"
            if context.facts.blocks:
                example = f"{parent(context.facts.blocks[0])}.*"
            raise PlanError(
                "context-blocks",
                f"no module of {type(model).__name__} is called {options.blocks!r}.",
                why="options={'context': {'blocks': ...}} is a pattern of the names that `model.named_modules()` gives",
                fix=f"write {example!r}",
            )
        for blocks in spans:
            _Span(blocks, group, context.plan.layout.cp, replace(options, method=method), streams).hook()
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # what it makes of padded batches has no sequence dimension
        return AppliedStrategy(model)


def _method(plan: Plan, facts: ModelFacts) -> tuple[str, str, str, str]:
    """Value, source, place and reason of the method that `auto` stands for."""
    # Ulysses gives each rank whole heads, of which tensor parallel has taken its share already.
    ranks = plan.layout.cp * plan.layout.tp
    heads = sorted(_heads(facts))
    numbers = ", ".join(map(str, heads))
    if not heads:
        return "ring", "derived", "", "works for any number of heads"
    if any(number % ranks for number in heads):
        return "ring", "derived", "", f"of {numbers} heads {ranks} is no divisor"
    return "ulysses", "derived", "", f"{numbers} heads are divided by {ranks}: one exchange before and after attention"


def _heads(facts: ModelFacts) -> set[int]:
    """Numbers of attention heads that modules inside the blocks tell."""
    heads: set[int] = set()
    for layer in facts.layers:
        if within_some(layer.name, facts.blocks):
            heads.update(number for key, number in layer.numbers if key in _HEADS)
    return heads


def _spans(model: nn.Module, pattern: str, names: tuple[str, ...], begins: set[str]) -> list[list[nn.Module]]:
    """Runs of blocks of one container that follow each other, each divided on its own.

    Args:
        model: with the blocks of this rank; where others hold them, modules without parameters stand.
        pattern: of the blocks' names, or "auto".
        names: names of the repeated blocks.
        begins: names of blocks that get hidden states from another rank.
    """
    modules = dict(model.named_modules())
    if pattern != "auto":
        depth = pattern.count(".")
        names = tuple(name for name in modules if name.count(".") == depth and fnmatchcase(name, pattern))
    spans: dict[tuple[str, int], list[nn.Module]] = {}
    run = 0
    for name in names:
        is_here = name in modules and next(modules[name].parameters(), None) is not None
        if name in begins or not is_here:
            run += 1
        if is_here:
            spans.setdefault((parent(name), run), []).append(modules[name])
    return list(spans.values())


class _Span:
    """Blocks that follow each other: hidden states are divided before the first and whole after the last.

    Args:
        blocks: in the order of their calls.
        group, ranks: of the cp axis.
        options: those of the strategy, its method decided.
        streams: of random numbers: each rank draws its own for its own positions.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        group: dist.ProcessGroup,
        ranks: int,
        options: ContextOptions,
        streams: RandomStreams,
    ) -> None:
        self.blocks = blocks
        self.group = group
        self.ranks = ranks
        self.options = options
        self.region: Region | None = None
        self.whole = False  # whether this call's sequence is not divided
        self.sizes = Sizes(0, 0, 0, 0)
        self.sample: Tensor | None = None  # the first block's input, for the trials
        self.untried = set(range(len(blocks))) if options.trial else set()
        self.streams = streams

    def __deepcopy__(self, memo: dict[int, Any]) -> _Span:
        """For a copy of the model: its own blocks, and the same group, which cannot be copied."""
        copied = copy(self)
        memo[id(self)] = copied
        copied.blocks = deepcopy(self.blocks, memo)
        copied.untried = set(self.untried)
        copied.region = None
        copied.sample = None
        return copied

    def hook(self) -> None:
        """Puts the hooks on."""
        for number, block in enumerate(self.blocks):
            divide_attention(block)
            block.register_forward_pre_hook(partial(self.enter, number), with_kwargs=True)
        self.blocks[-1].register_forward_hook(self.leave)

    def enter(
        self, number: int, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Before a block: divides what it is given. Ranks: all of the group, at a block's first call."""
        if getattr(block, "gradient_checkpointing", False) and block.training:
            raise TrainError(
                "context-recompute",
                "blocks that compute themselves again in the backward pass cannot tell divided from whole sequences.",
                why=f"{type(block).__name__}.gradient_checkpointing is set, and cp divides sequences",
                fix="call model.gradient_checkpointing_disable(), and use plan={'recompute': 'blocks'}",
            )
        call = BlockCall(block, args, kwargs)
        if number == 0:
            self.whole = not self.open(call)
        if self.whole:
            return args, {**kwargs, REGION: None}
        if number and self.region is None:
            raise TrainError(
                "context-order",
                f"{type(block).__name__} number {number} was called without the first one.",
                why="sequences are divided before the first block and whole after the last; torch.utils.checkpoint, too, "
                "calls blocks out of order",
                fix="call all blocks in order, and let plan={'recompute': 'blocks'} do activation checkpointing",
            )
        region = self.region
        sizes = self.sizes
        assert region is not None
        if number in self.untried and self.sample is not None:
            self.untried.discard(number)
            try_block(call, self.sample, region, sizes, number)

        def part(tensor: Tensor, name: str, hidden: bool) -> Tensor:
            if hidden:
                # Every block but the first gets this rank's part from the block before.
                return region.split(tensor, sizes.dim) if number == 0 else tensor
            dim = sequence_dim(tensor, name, sizes)
            return tensor if dim is None else region.split(tensor, dim)

        call = call.map(part)
        return call.args, {**call.kwargs, REGION: region}

    def open(self, call: BlockCall) -> bool:
        """Looks at the whole sequence and decides where its parts go; False where each rank computes it whole."""
        block = call.block
        hidden = call.hidden_states()
        dim = self.options.dim
        short = hidden.ndim > dim and hidden.shape[dim] < 2 * self.ranks
        if not torch.is_grad_enabled() and (short or call.has_cache):
            return False  # decoding: token by token, with a cache that other calls shall find whole
        if hidden.ndim < dim + 2:  # the last dimension holds the features of a position
            raise no_sequence(block, list(hidden.shape), dim, f"they have {hidden.ndim} dimensions")
        if hidden.shape[dim] < 2 * self.ranks:
            length = f"dimension {dim} of {list(hidden.shape)} is the sequence (option `dim`)"
            raise TrainError(
                "context-length",
                f"a sequence must have at least {2 * self.ranks} positions to be divided.",
                why=f"cp={self.ranks}: two parts for each rank; {length}",
                fix=f"use sequences of at least {2 * self.ranks} positions, or a smaller cp; inside `torch.no_grad()` "
                "shorter ones are computed whole",
            )
        self.sizes = Sizes.of(hidden, dim)
        division = Division(self.sizes.length, self.ranks, balanced=self.options.method == "ring")
        rank = dist.get_rank(self.group)
        self.region = Region(division, self.group, rank, self.options.method, hidden.device)
        if self.untried and not hidden.is_meta:
            self.sample = hidden.detach()
        self.streams.abandon()  # what an error in a block has left open
        if block.training:
            self.streams.open()
        return True

    def leave(self, block: nn.Module, args: tuple[object, ...], output: Tree) -> Tree:
        """After the last block: puts the parts together. Ranks: all of the group."""
        if self.whole:
            self.whole = False
            return output
        region = self.region
        assert region is not None
        if not region.attended:
            raise TrainError(
                "context-attention",
                f"no block ({type(block).__name__}) called scaled_dot_product_attention.",
                why="that call is where blocks reach the positions of other ranks; attention by hand sees its own alone",
                fix="compute attention with torch.nn.functional.scaled_dot_product_attention (transformers: "
                "attn_implementation='sdpa'), or name the blocks that do with options={'context': {'blocks': ...}}",
            )
        self.region = None
        self.sample = None
        self.streams.abandon()
        dim = self.sizes.dim

        def joined(tensor: Tensor) -> Tensor:
            is_part = tensor.ndim > max(1, dim) and tensor.shape[dim] == region.local
            return region.gather(tensor, dim) if is_part else tensor

        return map_tensors(joined, output)


STRATEGY = ContextParallel()
