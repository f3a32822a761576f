"""What `batch_norm` does to a model: statistics over the batch of all data-parallel ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from paceline.base.errors import PlanError
from paceline.parallel.data.converted_batch_norm import ConvertedBatchNorm
from paceline.parallel.data.peers import PEERS, BatchPeers, ReplacedCalls, SharedBatches
from paceline.parallel.differentiable import Differentiable
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.torch_internals.modules import BatchNormBase
from paceline.torch_internals.optimizers import model_of_update
from paceline.world.forward import override_forward


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Replaces the statistics of the model's batch norms, in place. Ranks: all."""
    # The statistics have a process group of their own: in the backward pass gradients are reduced at the same time, and
    # the order of both kinds of collectives may differ between ranks.
    group = context.mesh.statistics_group
    peers = BatchPeers(group, dist.get_world_size(group), context.idle)
    everything = context.options.statistics == "synced"
    for module in model.modules():
        # torch's own layer only gets the group, unless the script has chosen one.
        if type(module) is nn.SyncBatchNorm:
            module.process_group = module.process_group or group
    for layer in _layers(model, everything):
        _synchronise(layer, peers)
    applied = SharedStatistics(model, peers)
    itself = weakref.ref(applied)
    context.events.loop_began.subscribe(lambda _: _follow_update(itself(), everything))
    context.events.loop_over.subscribe(lambda *_: _end_update(itself()))
    return applied


def _layers(model: nn.Module, everything: bool) -> Iterator[nn.Module]:
    """Yields the batch norms of a model that are synchronised here; unless `everything`, those alone that were converted."""
    for module in model.modules():
        is_ours = isinstance(module, BatchNormBase) and type(module) is not nn.SyncBatchNorm
        if is_ours and (everything or isinstance(module, ConvertedBatchNorm)):
            yield module


def _synchronise(layer: nn.Module, peers: BatchPeers) -> None:
    """Lets a batch norm see the batches of all peers."""
    if not hasattr(layer, PEERS):
        override_forward(layer, "batch_norm", _forward)
    setattr(layer, PEERS, peers)


class SharedStatistics(SharedBatches):
    """A model whose batch norms take statistics over several ranks, which are its `peers`."""

    def __init__(self, model: nn.Module, peers: BatchPeers) -> None:
        super().__init__(model, [peers])
        self._peers_of_norms = peers
        self._updated: list[nn.Module] = []  # layers of another model, whose statistics `update_bn` is computing

    def begin_update(self, layers: Iterable[nn.Module]) -> None:
        """Synchronises the layers of an average of weights, which was not prepared: they see their own batch alone."""
        for layer in layers:
            if getattr(layer, PEERS, None) is None:
                _synchronise(layer, self._peers_of_norms)
                self._updated.append(layer)

    def end_update(self) -> None:
        """Lets these layers see their own batch alone again."""
        for layer in self._updated:
            setattr(layer, PEERS, None)
        self._updated.clear()


def _follow_update(applied: SharedStatistics | None, everything: bool) -> None:
    """Called when a loop over a prepared loader begins. If it is that of torch's `update_bn`, all ranks update together."""
    model = model_of_update()
    if applied is not None and model is not None:
        applied.begin_update(_layers(model, everything))


def _end_update(applied: SharedStatistics | None) -> None:
    if applied is not None:
        applied.end_update()


def is_synchronised(module: nn.Module) -> bool:
    """Returns whether a layer computes its statistics over all ranks, so that its buffers are the same everywhere."""
    return getattr(module, PEERS, None) is not None or isinstance(module, nn.SyncBatchNorm)


def _forward(self: nn.Module, original: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    peers: BatchPeers | None = getattr(self, PEERS)
    # Evaluation may run on one rank only. There a layer without running statistics uses those of its batch.
    if peers is None or peers.paused or peers.ranks == 1 or not self.training:
        return original(*args, **kwargs)
    with ReplacedCalls(_CALLS, peers):
        return original(*args, **kwargs)


def _batch_norm(
    peers: BatchPeers,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes `functional.batch_norm` over the batches of all peers; its arguments are the same.

    Shape: input [N, C, ...]; N may differ by rank.

    Ranks: all peers, if `training`.
    """
    if not training or input.is_meta:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    idle = peers.idle()
    with torch.no_grad():
        total, mean, variance = _statistics(input, peers, idle)
        if running_mean is not None and running_var is not None:
            # The batch is normalized by the biased variance, and the running one is unbiased, as in torch.
            unbiased = variance * (total / (total - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return _Normalise.call(input, weight, bias, mean, variance, total, eps, peers, idle)


def _statistics(input: Tensor, peers: BatchPeers, idle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count, mean and biased variance over the rows of all peers, without filler, in float64.

    Shape: input [N, C, ...]; count [], mean [C], variance [C].
    """
    channels = input.shape[1]
    # The variance is a difference of squares. If means are much larger than variances, float32 would lose all its digits.
    # [1 + 2 C]: the number of rows, the sum of each channel, the sum of squares of each channel; zeros on an idle rank.
    sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if input.numel() > 0 and not idle:
        values = input
        if input.dtype.itemsize < 4:
            values = input.float()
        dims = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(values, dims, correction=0)
        count = input.numel() // channels
        sums[0] = count
        sums[1 : 1 + channels] = mean.double() * count
        sums[1 + channels :] = (variance.double() + mean.double().square()) * count
    dist.all_reduce(sums, group=peers.group)
    total, means, squares = sums.split([1, channels, channels])
    mean = means / total
    return total, mean, (squares / total - mean.square()).clamp(min=0)


class _Normalise(Differentiable):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias with the mean and the variance over all peers."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        total: Tensor,
        eps: float,
        peers: BatchPeers,
        idle: bool,
    ) -> Tensor:
        # torch's kernel wants the statistics in the dtype of the weight; without one, in at least float32.
        dtype = torch.promote_types(input.dtype, torch.float32)
        if weight is not None:
            dtype = weight.dtype
        mean = mean.to(dtype)
        variance = variance.to(dtype)
        ctx.save_for_backward(input, weight, mean, variance, total)
        ctx.eps = eps
        ctx.peers = peers
        ctx.idle = idle
        return torch.native_batch_norm(input, weight, bias, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise PlanError(
                "batch-norm-double-backward",
                "gradients of gradients cannot be computed through batch norms whose statistics are those of all ranks.",
                why="a backward pass with create_graph=True went through one; batch_norm.statistics = synced",
                fix="set options={'batch_norm': {'statistics': 'local'}}, or start with `paceline launch --option "
                "batch_norm.statistics=local`",
            )
        input, weight, mean, variance, total = ctx.saved_tensors
        scale = weight
        if scale is None:
            scale = torch.ones_like(mean)
        # A gradient that is laid out in another way than the input, such as an expanded one, is copied.
        if gradient.stride() != input.stride():
            gradient = gradient.contiguous()
        # torch's kernel takes mean and variance for constants. It also returns the sums of dy * normalized x, and of dy, over
        # this rank's rows, from which the gradients of the statistics are computed.
        direct, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, input, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_weight, of_bias]).double()
        dist.all_reduce(sums, group=ctx.peers.group)
        if not ctx.idle:  # filler rows were no part of the statistics
            # The gradient through the mean and the variance is linear in x: -scale / sigma * (x_hat * along + across), with
            # x_hat = (x - mean) / sigma. It is written as slope * x + shift, each [C], to read the input once.
            along, across = (sums / total).to(mean.dtype)
            inverse = torch.rsqrt(variance + ctx.eps)
            slope = -scale * inverse * inverse * along
            shift = -scale * inverse * across - slope * mean
            shape = [1, -1] + [1] * (input.dim() - 2)
            direct += (input * slope.view(shape) + shift.view(shape)).to(direct.dtype)
        # Weight and bias get the sums over this rank's rows: another strategy averages them with all other gradients.
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if not needs_weight:
            of_weight = None
        if not needs_bias:
            of_bias = None
        return direct, of_weight, of_bias, None, None, None, None, None, None


_CALLS = {functional.batch_norm: _batch_norm}
