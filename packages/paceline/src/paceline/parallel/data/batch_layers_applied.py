"""What `batch_layers` does to a model: some layers see the batch of all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from paceline.parallel.data.peers import PEERS, BatchPeers, ReplacedCalls, SharedBatches
from paceline.parallel.divided_parameters import group_parameters, part_of
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.dispatch import has_no_values
from paceline.torch_internals.modules import InstanceNormBase
from paceline.world.forward import override_forward
from paceline.world.sharded import is_sharded, local


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Replaces what these layers compute, in place. Ranks: all."""
    all_peers: list[BatchPeers] = []
    group = context.mesh.statistics_group
    for module in model.modules():
        calls = _calls_of(module)
        if calls is None:
            continue
        peers = _LayerPeers(group, dist.get_world_size(group), context.idle, model=model)
        if not hasattr(module, PEERS):
            override_forward(module, "batch_layers", calls)
        setattr(module, PEERS, peers)
        all_peers.append(peers)
    return SharedBatches(model, all_peers)


@dataclass
class _LayerPeers(BatchPeers):
    """The peers of one layer.

    Attributes:
        model: the model around it, in which FSDP2 may have divided the weight.
        alone: whether the pass that runs is one of this rank alone: in evaluation, or while paused.
    """

    model: nn.Module | None = None
    alone: bool = False


def _calls_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """Returns the forward pass that takes the place of a module's own; None for a module that needs none."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _embedding_forward if module.max_norm is not None or module.scale_grad_by_freq else None
    if isinstance(module, InstanceNormBase) and module.running_mean is not None:
        return _instance_norm_forward
    return None


def _instance_norm_forward(self: nn.Module, original: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    peers: _LayerPeers | None = getattr(self, PEERS)
    if peers is None or peers.paused or peers.ranks == 1 or not self.training:
        return original(*args, **kwargs)
    with ReplacedCalls(_INSTANCE_NORM, peers):
        return original(*args, **kwargs)


def _instance_norm(
    peers: _LayerPeers,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes `functional.instance_norm`, and the running statistics over the samples of all peers.

    Shape: input [N, C, ...]; N may differ by rank.

    Ranks: all peers, if `use_input_stats`.
    """
    if running_mean is None or running_var is None or not use_input_stats or input.is_meta:
        return functional.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    # Each sample is normalised by its own statistics, so that the output needs no other rank.
    output = functional.instance_norm(input, None, None, weight, bias, True, momentum, eps)
    channels = input.shape[1]
    with torch.no_grad():
        # [1 + 2 C]: number of samples, sums of their means, sums of their unbiased variances; zeros on an idle rank.
        sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
        if input.numel() > 0 and not peers.idle():
            variances, means = torch.var_mean(input.double(), list(range(2, input.dim())), correction=1)
            sums[0] = input.shape[0]
            sums[1 : 1 + channels] = means.sum(0)
            sums[1 + channels :] = variances.sum(0)
        dist.all_reduce(sums, group=peers.group)
        count, mean, variance = sums.split([1, channels, channels])
        running_mean.lerp_((mean / count).to(running_mean.dtype), momentum)
        running_var.lerp_((variance / count).to(running_var.dtype), momentum)
    return output


def _embedding_forward(self: nn.Module, original: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    peers: _LayerPeers | None = getattr(self, PEERS)
    if peers is None or peers.ranks == 1:
        return original(*args, **kwargs)
    peers.alone = bool(peers.paused) or not self.training
    with ReplacedCalls(_EMBEDDINGS, peers):
        return original(*args, **kwargs)


def _embedding(
    peers: _LayerPeers,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Computes `functional.embedding` as if the indices of all peers were looked up at once. Ranks: all peers, in training."""
    if has_no_values(input):
        return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if peers.alone:
        output = functional.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
        return _shortened(output, max_norm, norm_type)
    counts = _looked_up(peers, input, weight, scale_grad_by_freq)
    if max_norm is not None:
        _renormalise(peers, weight, counts, max_norm, norm_type)
    output = functional.embedding(input, weight, padding_idx, None, norm_type, False, sparse)
    if scale_grad_by_freq and output.requires_grad:
        divisors = counts[input].clamp(min=1).unsqueeze(-1)  # a filler row is looked up on an idle rank alone
        output.register_hook(lambda gradient: gradient / divisors.to(gradient.dtype))
    return output


def _embedding_bag(
    peers: _LayerPeers,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Computes `functional.embedding_bag` as if the indices of all peers were looked up at once.

    Ranks: all peers, in training.
    """
    # torch takes no frequencies in this mode, and says so.
    refused = scale_grad_by_freq and mode == "max"
    if refused or has_no_values(input):
        of_bags = (per_sample_weights, include_last_offset, padding_idx)
        return functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, *of_bags
        )
    # The rows are looked up first, and the bags then made of them: [indices, dim]. So an index has a gradient of its own.
    rows = _embedding(peers, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    rows = rows.reshape(-1, weight.shape[1])
    numbers = torch.arange(len(rows), device=input.device)
    padding = None
    if padding_idx is not None:
        # An index that is padding becomes that of one more row.
        padding = len(rows)
        rows = functional.pad(rows, (0, 0, 0, 1))
        numbers = numbers.masked_fill(input.reshape(-1) == padding_idx % len(weight), padding)
    return functional.embedding_bag(
        numbers.view(input.shape),
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def _looked_up(peers: _LayerPeers, input: Tensor, weight: Tensor, how_often: bool) -> Tensor:
    """Returns for each row whether any peer looks it up, or how often all of them do. Shape: returns [rows of the weight]."""
    dtype = torch.int32 if how_often else torch.uint8
    counts = torch.zeros(weight.shape[0], dtype=dtype, device=input.device)
    if not peers.idle():
        indices = input.reshape(-1)
        if how_often:
            counts.index_add_(0, indices, torch.ones_like(indices, dtype=dtype))
        else:
            counts[indices] = 1
    operation = dist.ReduceOp.SUM if how_often else dist.ReduceOp.MAX
    dist.all_reduce(counts, op=operation, group=peers.group)
    return counts


def _renormalise(peers: _LayerPeers, weight: Tensor, counts: Tensor, max_norm: float, norm_type: float) -> None:
    """Shortens the rows of the weight that were looked up, as torch does, and those of this rank's shard of it."""
    with torch.no_grad():
        rows = counts.nonzero().view(-1)
        # FSDP2 computes with a copy of its shards, perhaps in half precision: the shards are shortened themselves.
        torch.embedding_renorm_(internals.unnoticed(weight), rows, max_norm, norm_type)
        assert peers.model is not None
        for parameter in group_parameters(peers.model):
            if internals.whole_parameter(parameter) is not weight:
                continue
            shard = internals.sharded_parameter(parameter)
            own = counts
            if is_sharded(shard):
                own = part_of(counts, shard)
            torch.embedding_renorm_(local(shard.detach()), own.nonzero().view(-1), max_norm, norm_type)


def _shortened(output: Tensor, max_norm: float | None, norm_type: float) -> Tensor:
    """Returns rows as they are looked up after a renormalisation; gradients pass as they do there. Shape: output [..., dim]."""
    if max_norm is None:
        return output
    with torch.no_grad():
        lengths = output.norm(norm_type, dim=-1, keepdim=True)
        shortened = output * (max_norm / (lengths + _TINY))
        shortened = torch.where(lengths > max_norm, shortened, output)
        change = shortened - output
    if not output.requires_grad:
        return shortened
    return output + change


_TINY = 1e-7  # torch adds it to the length of a row before it divides by that

_INSTANCE_NORM: dict[Callable[..., Any], Callable[..., Any]] = {functional.instance_norm: _instance_norm}

_EMBEDDINGS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
}
