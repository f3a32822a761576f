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

from collections.abc import Callable
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
from paceline.parallel.same_inputs import SameInputs
from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.parallel.tensor.tensor import STRATEGY as TENSOR
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import parent, within_some
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.plan.rules import origin
from paceline.world.forward import override_forward
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
        if plan.layout.tp > 1 and TENSOR.options(plan).sequence:
            problems.append(
                Problem(
                    "context-sequence",
                    "context and tensor parallelism would divide the same positions.",
                    why=f"{origin(plan, 'cp')}, {origin(plan, 'tp')} with options={{'tensor': {{'sequence': True}}}}",
                    fix="remove the option `sequence`: cp divides activations already",
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
        return [Decision("context.method", *_method(plan, facts))]

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
            method = _method(plan, facts)[0]
        if method == "ring":
            sent = 3 * (cp - 1) * keys_and_values
        else:
            sent = 4 * (cp - 1) * keys_and_values // cp
        return replace(before, activations=activations, sent=before.sent + sent)

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Registers hooks on the blocks; the model stays the same object.

        Raises:
            PlanError: `context-blocks`, if the pattern matches no module.
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
        hooked = [
            _Span(blocks, group, context.plan.layout.cp, replace(options, method=method), streams) for blocks in spans
        ]
        for span in hooked:
            span.hook()
        # The inputs of a later stage of a pipeline are divided already.
        if context.plan.layout.pp == 1:
            SameInputs(model, "cp", context.collectives.over(group))
        override_forward(model, "context_between", _explaining(hooked))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # nested tensors of padded batches have no sequence dimension
        return AppliedStrategy(model)


def _method(plan: Plan, facts: ModelFacts) -> tuple[str, str, str, str]:
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


def _spans(model: nn.Module, pattern: str, names: tuple[str, ...], begins: set[str]) -> list[list[nn.Module]]:
    """Returns runs of consecutive blocks of one container; sequences are divided in each run separately.

    Args:
        model: with the blocks of this rank; blocks of other ranks are modules without parameters.
        pattern: a pattern of the blocks' names, or "auto".
        names: the names of the repeated blocks.
        begins: the names of blocks that get hidden states from another rank.
    """
    modules = dict(model.named_modules())
    if pattern != "auto":
        # `fnmatch` lets * match dots too, so `layers.*` would match what is inside of the layers.
        depth = pattern.count(".")
        names = tuple(name for name in modules if name.count(".") == depth and fnmatchcase(name, pattern))
    spans: dict[tuple[str, int], list[nn.Module]] = {}
    run = 0
    for name in names:
        is_here = name in modules and next(modules[name].parameters(), None) is not None
        # A run ends where the next block is on another rank, and where hidden states come from another rank.
        if name in begins or not is_here:
            run += 1
        if is_here:
            spans.setdefault((parent(name), run), []).append(modules[name])
    return list(spans.values())


def _explaining(spans: list[_Span]) -> Callable[..., Any]:
    """Returns a forward of the model that explains an error of the code between two blocks, which sees divided sequences."""

    def forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        for span in spans:
            span.is_between = False
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            # A subclass is another kind of error, such as one of the communication.
            if type(error) is not RuntimeError or not any(span.is_between for span in spans):
                raise
            raise TrainError(
                "context-between",
                f"{type(self).__name__}.forward computes with hidden states between two blocks, where they are divided.",
                why=f"cp divides sequences before the first block and gathers them after the last one; torch says: "
                f"{str(error).splitlines()[0]}",
                fix="move that code into the blocks, such as a residual connection `x + block(x)`",
            ) from error

    return forward


class _Span:
    """Consecutive blocks: hidden states are divided before the first one and gathered after the last one.

    Args:
        blocks: in the order of their calls.
        group, ranks: of the cp axis.
        options: the options of the strategy, with a decided method.
        streams: random number generators: inside of the blocks each rank draws numbers for its own positions.
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
        self.is_between = False  # whether the code between two blocks runs
        self.whole = False  # whether each rank computes the whole sequence of this call
        self.sizes = Sizes(0, 0, 0, 0)
        self.sample: Tensor | None = None  # the input of the first block, for the trials
        self.untried: set[int] = set()  # numbers of the blocks that are still to be tried
        if options.trial:
            self.untried.update(range(len(blocks)))
        self.streams = streams

    def __deepcopy__(self, memo: dict[int, Any]) -> _Span:
        """Copies the blocks together with the model, but keeps the process group, which cannot be copied."""
        copied = copy(self)
        memo[id(self)] = copied
        copied.blocks = deepcopy(self.blocks, memo)
        copied.untried = set(self.untried)
        copied.region = None
        copied.sample = None
        return copied

    def hook(self) -> None:
        """Registers the hooks."""
        for number, block in enumerate(self.blocks):
            divide_attention(block)
            block.register_forward_pre_hook(partial(self.enter, number), with_kwargs=True)
            if number + 1 < len(self.blocks):
                block.register_forward_hook(self.pause)
        self.blocks[-1].register_forward_hook(self.leave)

    def pause(self, *_: object) -> None:
        """A hook after each block but the last."""
        self.is_between = not self.whole

    def enter(
        self, number: int, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """A hook before a block: divides its arguments. Ranks: all of the group, at the first call of a block."""
        self.is_between = False
        if getattr(block, "gradient_checkpointing", False) and block.training:
            raise TrainError(
                "context-recompute",
                "blocks with gradient checkpointing of their own cannot be used with context parallelism.",
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
                why="sequences are divided before the first block and gathered after the last one; torch.utils.checkpoint, "
                "too, calls blocks out of order",
                fix="call all blocks in order, and use plan={'recompute': 'blocks'} for activation checkpointing",
            )
        region = self.region
        sizes = self.sizes
        assert region is not None
        if number in self.untried and self.sample is not None:
            self.untried.discard(number)
            try_block(call, self.sample, region, sizes, number)

        def part(tensor: Tensor, name: str, hidden: bool) -> Tensor:
            if hidden:
                # Each block but the first gets this rank's part from the block before it.
                return region.split(tensor, sizes.dim) if number == 0 else tensor
            # Other arguments (masks, rotary tables) come from the user's code, and so are whole for every block.
            dim = sequence_dim(tensor, name, sizes)
            return tensor if dim is None else region.split(tensor, dim)

        call = call.map(part)
        return call.args, {**call.kwargs, REGION: region}

    def open(self, call: BlockCall) -> bool:
        """Decides how a whole sequence is divided. Returns False if each rank computes the whole sequence."""
        block = call.block
        hidden = call.hidden_states()
        dim = self.options.dim
        short = hidden.ndim > dim and hidden.shape[dim] < 2 * self.ranks
        # Decoding token by token, with a cache of keys and values that must stay whole for later calls.
        if not torch.is_grad_enabled() and (short or call.has_cache):
            return False
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
        self.streams.abandon()  # an error in a block may have left them open
        if block.training:
            self.streams.open()
        return True

    def leave(self, block: nn.Module, args: tuple[object, ...], output: Tree) -> Tree:
        """A hook after the last block: gathers the parts of its output. Ranks: all of the group."""
        if self.whole:
            self.whole = False
            return output
        region = self.region
        assert region is not None
        if not region.attended:
            raise TrainError(
                "context-attention",
                f"no block ({type(block).__name__}) called scaled_dot_product_attention.",
                why="this call gives blocks the positions of other ranks; attention by hand sees this rank's positions only",
                fix="compute attention with torch.nn.functional.scaled_dot_product_attention (transformers: "
                "attn_implementation='sdpa'), or name the blocks that do with options={'context': {'blocks': ...}}",
            )
        self.region = None
        self.sample = None
        self.streams.abandon()
        dim = self.sizes.dim

        def joined(tensor: Tensor) -> Tensor:
            # A block may put out more than hidden states, such as a loss of its router.
            is_part = tensor.ndim > max(1, dim) and tensor.shape[dim] == region.local
            if not is_part:
                return tensor
            return region.gather(tensor, dim)

        return map_tensors(joined, output)


STRATEGY = ContextParallel()
