"""What `context` does to a model: hooks divide sequences before the first block and gather them after the last."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import PlanError, TrainError
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.fqn import parent
from paceline.world.forward import override_forward
from paceline.world.tree import Tree, map_tensors
from paceline_large.context.block_calls import REGION, BlockCall, divide_attention
from paceline_large.context.context import ContextOptions, chosen_method
from paceline_large.context.sequence_split import SequenceDivision, SequenceRegion, Sizes, sequence_dim
from paceline_large.context.trial import no_sequence, try_block
from paceline_large.hooks_on_parts import ALL_HOOKS, ON_INPUTS, HooksOnParts
from paceline_large.random_streams import RandomStreams
from paceline_large.same_inputs import SameInputs
from paceline_large.torch_internals.hooks import FORWARD, module_hooks


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
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
        method = chosen_method(context.plan, context.facts)[0]
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
        _BlockSpan(blocks, group, context.plan.layout.cp, replace(options, method=method), streams) for blocks in spans
    ]
    for span in hooked:
        span.hook()
    # The inputs of a later stage of a pipeline are divided already.
    if context.plan.layout.pp == 1 and context.runtime.others_answer:
        SameInputs(model, "cp", context.collectives.over(group))
    override_forward(model, "context_between", _explaining(hooked))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors of padded batches have no sequence dimension
    return AppliedStrategy(model)


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


def _explaining(spans: list[_BlockSpan]) -> Callable[..., Any]:
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


class _BlockSpan:
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
        self.region: SequenceRegion | None = None
        self.is_between = False  # whether the code between two blocks runs
        self.whole = False  # whether each rank computes the whole sequence of this call
        self.sizes = Sizes(0, 0, 0, 0)
        self.sample: Tensor | None = None  # the input of the first block, for the trials
        self.hooks = HooksOnParts(
            "the positions of this process, because `cp` divides sequences: what is computed of each position, or is a mean "
            "over all, is that of one process, and nothing else. What comes before the first block and after the last is whole."
        )
        self.untried: set[int] = set()  # numbers of the blocks that are still to be tried
        if options.trial:
            self.untried.update(range(len(blocks)))
        self.streams = streams

    def __deepcopy__(self, memo: dict[int, Any]) -> _BlockSpan:
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
            # What is inside of a block is tried. Later hooks on the last one get what `leave` has gathered.
            sees_whole = number + 1 == len(self.blocks) and not module_hooks(block)[FORWARD]
            self.hooks.add(f"block number {number}", block, ON_INPUTS if sees_whole else ALL_HOOKS)
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
            self.hooks.look()
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
            # In a context without variables, in which transformers keeps what it records of a pass, such as router logits.
            contextvars.Context().run(try_block, call, self.sample, region, sizes, number)

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
        division = SequenceDivision(self.sizes.length, self.ranks, balanced=self.options.method == "ring")
        rank = dist.get_rank(self.group)
        self.region = SequenceRegion(division, self.group, rank, self.options.method, hidden.device)
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
