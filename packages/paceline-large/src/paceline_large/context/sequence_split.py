"""How one sequence is divided over the ranks of the `cp` axis, and the two ways across: `split` and `gather`.

    balanced     2 n chunks, rank i holds chunks i and 2 n - 1 - i       n = 2:  rank 0: 0 3   rank 1: 1 2
    contiguous   rank i holds the i-th of n parts

A causal query attends to the positions before it, so early chunks need little work and late chunks much. One early and one
late chunk together are the same work for every rank. (Brandon et al., "Striped Attention", 2023, interleave single positions
for the same reason.)

A sequence may have any length of at least 2 n. The last chunks are filled up with copies of the last position. No real query
sees these copies, and their outputs are dropped.

Gradients: each rank computes the same loss from the whole sequence, and data parallel strategies average gradients over the
ranks. The backward of `gather` gives each rank n times the gradient of its own positions, so that the average over the ranks
is the sum over positions. The backward of `split` divides by n again: the gradient before it is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.base.errors import TrainError
from paceline.parallel.differentiable import Differentiable
from paceline.world.transport import transport_of


@dataclass(frozen=True)
class SequenceDivision:
    """Where the positions of one sequence are.

    Attributes:
        length: positions of the whole sequence, `S` below.
        ranks: along `cp`, `n` below.
        balanced: two chunks a rank instead of one.
    """

    length: int
    ranks: int
    balanced: bool

    @property
    def chunk(self) -> int:
        """Positions in half of what a rank holds: S / (2 n), rounded up."""
        return -(-self.length // (2 * self.ranks))

    @property
    def local(self) -> int:
        """Positions on each rank, fillers included."""
        return 2 * self.chunk

    def chunks(self, rank: int) -> tuple[int, int]:
        """Returns the two chunks that `rank` holds, the earlier first."""
        if self.balanced:
            return rank, 2 * self.ranks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def real(self, rank: int) -> int:
        """Returns how many positions of `rank` are no fillers; they come first."""
        total = 0
        for number in self.chunks(rank):
            positions_left = max(0, self.length - number * self.chunk)  # from the beginning of the chunk to the end
            total += min(positions_left, self.chunk)
        return total


@dataclass(eq=False)
class SequenceRegion:
    """One passage of a batch through the repeated blocks, each rank with its part of the sequence.

    Attributes:
        division: of the sequence.
        group, rank: the `cp` group, and this process's place in it.
        method: "ring" or "ulysses".
        device: where hidden states are.
        attended: calls of attention so far.
    """

    division: SequenceDivision
    group: dist.ProcessGroup
    rank: int
    method: str
    device: torch.device
    attended: int = 0

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.division.length

    @property
    def local(self) -> int:
        """Positions on this rank, fillers included."""
        return self.division.local

    @cached_property
    def own(self) -> Tensor:
        """Positions of this rank, fillers replaced by the last position. Shape: [local]."""
        return self.positions(self.rank)

    @cached_property
    def order(self) -> Tensor:
        """Where each position is in the concatenation of all ranks. Shape: [length]."""
        position = torch.arange(self.length, device=self.device)
        if not self.division.balanced:
            return position
        chunk, ranks = self.division.chunk, self.division.ranks
        number = position // chunk  # of the chunk in which a position is
        early = number < ranks
        owner = torch.where(early, number, 2 * ranks - 1 - number)
        # Each rank's part begins with its early chunk, and its late chunk follows.
        return owner * 2 * chunk + torch.where(early, 0, chunk) + position % chunk

    def positions(self, rank: int) -> Tensor:
        """Positions of `rank`, fillers replaced by the last position. Shape: [local]."""
        chunk = self.division.chunk
        starts = torch.tensor(self.division.chunks(rank), device=self.device) * chunk
        return (starts[:, None] + torch.arange(chunk, device=self.device)).view(-1).clamp_(max=self.length - 1)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is whole on every rank. Its backward communicates."""
        return _SplitSequence.call(tensor, self, dim)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the whole of a tensor of which every rank holds a part. Ranks: all of the group."""
        return _GatherSequence.call(tensor, self, dim)


def _whole(part: Tensor, region: SequenceRegion, dim: int) -> Tensor:
    ranks = region.division.ranks
    mine = part.movedim(dim, 0).contiguous()
    parts = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
    if not part.is_meta:
        transport_of(region.group, part.device).all_gather(parts.view(-1), mine.view(-1)).wait()
    return parts.movedim(0, dim).index_select(dim, region.order.to(part.device))


def _part(whole: Tensor, region: SequenceRegion, dim: int) -> Tensor:
    return whole.index_select(dim, region.own.to(whole.device))


class _SplitSequence(Differentiable):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, region: SequenceRegion, dim: int) -> Tensor:
        ctx.region, ctx.dim = region, dim
        return _part(tensor, region, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _whole(gradient, ctx.region, ctx.dim) / ctx.region.division.ranks, None, None


class _GatherSequence(Differentiable):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, region: SequenceRegion, dim: int) -> Tensor:
        ctx.region, ctx.dim = region, dim
        return _whole(tensor, region, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        division, dim = ctx.region.division, ctx.dim
        part = _part(gradient, ctx.region, dim) * division.ranks
        # Fillers are copies of the last position, whose gradient must count once. Their outputs were dropped.
        real = division.real(ctx.region.rank)
        part.narrow(dim, real, division.local - real).zero_()
        return part, None, None


# -- which arguments of a block run along the sequence ---------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What hidden states of a block look like: their sequence runs along `dim`."""

    dim: int
    length: int
    batch: int
    width: int

    @classmethod
    def of(cls, hidden: Tensor, dim: int) -> Sizes:
        """Reads them from whole hidden states. Shape: [batch, length, width], or [length, batch, width] for dim 0."""
        return cls(dim, hidden.shape[dim], hidden.shape[1 - dim], hidden.shape[-1])


def sequence_dim(tensor: Tensor, name: str, sizes: Sizes) -> int | None:
    """Along which dimension an argument of a block runs over the sequence; None where it goes to each rank whole.

    Divided are: what is shaped like hidden states, rotary tables [1 or B, (1,) S, d] and [S, d], position ids [B, S] and
    [S], masks of single positions [B, S]. Whole stay: attention masks [.., S, S] and [.., 1, S], whose parts
    the attention takes itself, and everything without a dimension of length S.

    Args:
        tensor: the argument, whole.
        name: of the parameter that takes it.
        sizes: of the hidden states.

    Raises:
        TrainError: `context-ambiguous`.
    """
    shape = tensor.shape
    length = sizes.length
    if length not in shape:
        return None
    is_mask = tensor.dtype == torch.bool or "mask" in name or "bias" in name
    if tensor.ndim > 2:
        if is_mask and shape[-1] == length:
            return None
        if shape[sizes.dim] == length:
            return sizes.dim
        if shape[-2] == length:
            return tensor.ndim - 2
        return None
    if tensor.ndim == 2:
        # A square mask is one of pairs of positions, unless a batch has as many samples as positions and the name says
        # that it is a padding mask [B, S].
        may_be_padding = sizes.batch == length and ("key" in name or "padding" in name)
        if is_mask and shape[0] == shape[1] and not may_be_padding:
            return None
        # Where features are as many as positions, [1, n] of floats may be a bias or scale along the features.
        may_be_features = tensor.is_floating_point() and not is_mask and sizes.width == length
        if shape[1] == length and shape[0] in (1, sizes.batch) and not may_be_features:
            return 1
        if shape[0] == length and shape[1] != length and sizes.batch != length:
            return 0
    elif sizes.batch != length:
        return 0
    raise TrainError(
        "context-ambiguous",
        f"the argument `{name}` {list(shape)} of a block may or may not run along the sequence.",
        why=f"sequence, batch and width are {length}, {sizes.batch} and {sizes.width}: a size of {length} is ambiguous",
        fix="use another batch size or sequence length",
    )
