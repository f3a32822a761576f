"""Runs a block once on a short part of the first sequence, divided and whole, and compares the results.

A block may mix positions in another way than by attention: with a convolution, with attention by hand, or with positions
that it counts itself. On a divided sequence its results would silently be wrong.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.world.tree import tensors
from paceline_large.context.attention_calls import AttentionCalls
from paceline_large.context.block_calls import BlockCall
from paceline_large.context.sequence_split import SequenceDivision, SequenceRegion, Sizes, sequence_dim
from paceline_large.evaluation import evaluating

_TRIED = 16  # positions on each rank, at most


def try_block(call: BlockCall, sample: Tensor, region: SequenceRegion, sizes: Sizes, number: int) -> None:
    """Runs a block on the beginning of a sequence, whole and divided, without gradients, and compares.

    Args:
        call: the current call; its hidden states are divided already unless `number` is 0.
        sample: undivided hidden states, the input of the first block.
        region, sizes: of the call.
        number: of the block.

    Shape: sample [B, S, D], or [S, B, D] with the option dim=0.

    Ranks: all of the cp group.

    Raises:
        TrainError: `context-differs`, `context-dimension`.
    """
    block = call.block
    ranks = region.division.ranks
    # A multiple of 2 * ranks, so that no rank has fillers, and at most `_TRIED` positions on each.
    length = min(sizes.length // (2 * ranks), _TRIED // 2) * 2 * ranks
    short_region = replace(region, division=SequenceDivision(length, ranks, region.division.balanced))
    dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), sample.dtype)
    short_sample = sample.narrow(sizes.dim, 0, length).to(dtype)

    # Which dimension of an argument is the sequence is asked of the argument itself, as in the call: its beginning may be as
    # long as the argument is wide.
    def beginning(tensor: Tensor, name: str, hidden: bool) -> Tensor:
        # The hidden states of this call are divided already, except in the first block, so all blocks get the sample.
        if hidden:
            return short_sample
        return _beginning(tensor, sequence_dim(tensor, name, sizes), sizes, length, dtype)

    def part(tensor: Tensor, name: str, hidden: bool) -> Tensor:
        dim: int | None = sizes.dim
        if not hidden:
            dim = sequence_dim(tensor, name, sizes)
        short = beginning(tensor, name, hidden)
        return short if dim is None else short_region.split(short, dim)

    # The rounding of autocast would hide differences, and the trial must not fill a cache.
    with torch.no_grad(), evaluating(block), torch.autocast(sample.device.type, enabled=False):
        call = call.without_caches()
        try:
            whole = _output(call.map(beginning))
            divided_call = call.map(part)
            with AttentionCalls(short_region):
                divided = _output(divided_call)
        except RuntimeError as error:
            # A subclass is another kind of error, such as one of the communication.
            if type(error) is not RuntimeError:
                raise
            # torch raises a plain RuntimeError if sizes do not fit: the block needs all of this dimension.
            reason = str(error).splitlines()[0]
            raise no_sequence(block, list(short_sample.shape), sizes.dim, reason) from error
    # If a block differs on one rank, all ranks raise. Otherwise the others would wait for this rank in the next collective.
    differs = _differ(whole, divided, short_sample, short_region, sizes.dim).to(torch.int32)
    dist.all_reduce(differs, group=region.group)
    if differs.item():
        raise TrainError(
            "context-differs",
            f"{type(block).__name__} number {number} gives other results for a divided sequence than for a whole one.",
            why="something besides scaled_dot_product_attention mixes positions or counts them: attention by hand, a "
            "convolution or recurrence over the sequence, or rotary angles that the block makes for itself",
            fix="make positions before the blocks and pass them in; if the block is random or counts tokens in evaluation, "
            "too, set options={'context': {'trial': False}}",
        )


def no_sequence(block: nn.Module, shape: list[int], dim: int, reason: str) -> TrainError:
    """Returns the error for hidden states without a sequence dimension.

    Args:
        block: the block that got them.
        shape: of the hidden states.
        dim: the dimension that was assumed to be the sequence.
        reason: why it is not.
    """
    return TrainError(
        "context-dimension",
        f"{type(block).__name__} cannot compute a part of dimension {dim} of its input, so there is no sequence to divide.",
        why=f"cp divides hidden states [batch, sequence, features] along dimension {dim} (option `dim`); these are "
        f"{shape}: {reason}",
        fix="leave `cp` out and use `replicate` or `shard`; for [sequence, batch, features] set "
        "options={'context': {'dim': 0}}",
    )


def _beginning(tensor: Tensor, dim: int | None, sizes: Sizes, length: int, dtype: torch.dtype) -> Tensor:
    """Returns the first `length` positions of an argument, in the dtype of the block's parameters.

    Args:
        tensor: the argument.
        dim: its sequence; None if it has none.
        sizes: of the call.
        length: of the beginning.
        dtype: of the block's parameters.
    """
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if dim is not None:
        return tensor.narrow(dim, 0, length)
    # Of masks both the queries and the keys are positions.
    for mask_dim in (-1, -2):
        if tensor.ndim > 1 and tensor.shape[mask_dim] == sizes.length:
            tensor = tensor.narrow(mask_dim, 0, length)
    return tensor


def _output(call: BlockCall) -> Tensor:
    return tensors(call.own_forward(*call.args, **call.kwargs))[0]


def _differ(whole: Tensor, divided: Tensor, sample: Tensor, region: SequenceRegion, dim: int) -> Tensor:
    """Returns whether the divided output differs from this rank's part of the whole output. Shape: []."""
    expected = whole.index_select(dim, region.own).float()
    # Most blocks have a residual connection. Differences are compared with what a block adds to its input, since the input
    # may be much larger.
    added = expected
    if whole.shape[-1] == sample.shape[-1]:
        added = expected - sample.index_select(dim, region.own).float()
    relative = 1e-3
    if sample.dtype.itemsize <= 2:
        relative = 2e-2  # bfloat16 has 8 bits of precision
    # What is added may be close to zero; then the rounding of the output itself is allowed for.
    rounding = 8 * torch.finfo(whole.dtype).eps * expected.abs().max()
    difference = (divided.float() - expected).abs().max()
    return difference > relative * added.abs().max() + rounding
