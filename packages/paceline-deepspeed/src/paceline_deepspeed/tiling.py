"""Layers that run a part of their input, or of their weight, at a time, so that less is in memory at once.

    TiledMLP.apply(forward, mlp, x, shards, [])     an MLP, for `shards` parts of a sequence one after the other
    TiledFusedLogitsLoss.apply(...)                 a head with its loss, likewise: the logits are never there as a whole
    sequence_tiled_compute(...)                     any function of tensors of shape [B, T, ...]
    TiledLinear(in_features, out_features, ...)     a linear layer of small ones

The parts of a sequence are computed again in the backward pass (`torch.utils.checkpoint`). Autograd adds up their gradients,
so the lists of parameters that DeepSpeed needs (`compute_params`) have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import ConfigError
from paceline_deepspeed.partition import uniform
from paceline_deepspeed.zero import GatheredParameters


def _reduced(outputs: Sequence[Tensor], reduction: str | None) -> Tensor:
    """Joins what the parts gave: `reduction` of scalars, which "mean" and "sum" name."""
    values = torch.stack(list(outputs))
    if reduction == "mean":
        return values.mean()
    if reduction == "sum":
        return values.sum()
    raise ConfigError(
        "deepspeed-tiles",
        f"there is no reduction {reduction!r} of the parts of a loss.",
        fix='write "mean" or "sum"',
    )


class TiledMLP:
    """Runs an MLP on one part of a sequence after the other."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: object = None
    ) -> Tensor:
        """Returns `fn(self, x)`.

        Args:
            fn: the forward pass, which treats each position by itself.
            self: its first argument, usually the module.
            x: the input.
            shards: how many parts.
            compute_params: not needed.

        Shape:
            [..., T, features] with T positions, which are divided.
        """
        outputs = [checkpoint(fn, self, part, use_reentrant=False) for part in torch.chunk(x, shards, dim=-2)]
        return torch.cat(outputs, dim=-2)


class TiledFusedLogitsLoss:
    """Computes the loss of one part of the positions after the other."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: object = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Returns the mean or the sum of the losses of all parts.

        Args:
            fn: takes `self`, a part of `x`, of `y` and, where there is one, of `mask`; returns a 0-dim loss.
            self: its first argument, usually the module with the head.
            x, y, mask: hidden states, labels, and what `fn` makes of a mask.
            shards: how many parts. Parts of different sizes count the same in a mean.
            compute_params: not needed.
            output_reduction: "mean" or "sum".

        Shape:
            x: [B, T, ...], y: [B, T, ...], mask: [B, T]; `fn` gets [part of B * T, ...].

        Raises:
            ConfigError: `deepspeed-tiles`.
        """
        given = [x, y] if mask is None else [x, y, mask]
        if any(tensor.shape[:2] != x.shape[:2] or tensor.dim() < 2 for tensor in given):
            raise ConfigError(
                "deepspeed-tiles",
                "the tensors of a loss in parts do not have the same positions.",
                why=f"x, y and mask begin with [B, T]; they are {', '.join(str(list(tensor.shape)) for tensor in given)}",
                fix="pass the labels and the mask of exactly these hidden states",
            )
        parts = [torch.chunk(tensor.flatten(0, 1), shards) for tensor in given]
        losses = [checkpoint(fn, self, *part, use_reentrant=False) for part in zip(*parts, strict=True)]
        return _reduced(losses, output_reduction)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: object = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Returns what a function gives for one part of a sequence after the other.

    Args:
        fn: is called with all tensors by their names.
        seqlen: positions of the whole sequence.
        shards: how many parts.
        kwargs_to_shard: what is divided.
        kwargs_to_pass: what each call gets as it is.
        grad_requiring_tensor_key, compute_params: not needed, since autograd finds what needs a gradient.
        output_unshard_dimension: of the outputs, along which they are joined; 0: `fn` gives a 0-dim loss.
        output_reduction: "mean" or "sum" of the joined outputs, or None.

    Shape:
        each of `kwargs_to_shard`: [B, seqlen, ...].

    Raises:
        ConfigError: `deepspeed-tiles`.
    """
    size = math.ceil(seqlen / shards)
    outputs: list[Tensor] = []
    for begin in range(0, seqlen, size):
        part = {name: tensor[:, begin : begin + size] for name, tensor in kwargs_to_shard.items()}
        outputs.append(checkpoint(partial(fn, **part, **kwargs_to_pass), use_reentrant=False))
    whole = torch.stack(outputs) if output_unshard_dimension == 0 else torch.cat(outputs, output_unshard_dimension)
    return whole if output_reduction is None else _reduced([*whole.flatten()], output_reduction)


class TiledLinear(nn.Module):
    """A linear layer of `out_splits` x `in_splits` small ones, named `linears.ROW.COLUMN`.

    Args:
        in_features, out_features, bias: as for `nn.Linear`.
        in_splits, out_splits: how many tiles there are along each dimension.
        input_is_already_split: whether the input is a list with a tensor for each column of tiles.
        combine_out_splits: whether the outputs of all rows are joined; else they are a list.
        linear_cls: class of the tiles.
        init_linear: a layer whose weight and bias are copied.
        keywords: for `linear_cls`.

    Raises:
        ConfigError: `deepspeed-tiles`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ConfigError(
                    "deepspeed-tiles",
                    f"a linear layer cannot have {name}_splits={splits}.",
                    why=f"{name}_features is {features}",
                    fix=f"choose a number from 1 to {features}",
                )
        self.in_features = in_features
        self.out_features = out_features
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = uniform(in_features, in_splits)
        self.out_parts = uniform(out_features, out_splits)
        rows: list[nn.Module] = []
        for out_begin, out_end in pairwise(self.out_parts):
            tiles: list[nn.Module] = []
            for in_begin, in_end in pairwise(self.in_parts):
                has_bias = bias and in_end == in_features  # the last tile of a row adds it
                tiles.append(linear_cls(in_end - in_begin, out_end - out_begin, bias=has_bias, **keywords))
            rows.append(nn.ModuleList(tiles))
        self.linears = nn.ModuleList(rows)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Returns the product, or a list of those of the rows.

        Shape:
            [..., in_features] to [..., out_features].
        """
        parts = input_
        if not self.input_is_already_split or self.in_splits == 1:
            sizes = [end - begin for begin, end in pairwise(self.in_parts)]
            parts = torch.split(input_, sizes, dim=-1)
        outputs: list[Tensor] = []
        for row in self.linears:
            products = [tile(part) for tile, part in zip(row, parts, strict=True)]  # type: ignore[call-overload]
            total = products[0]
            for product in products[1:]:
                total = total + product
            outputs.append(total)
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies the weight and the bias of a layer. Ranks: all, where parameters are divided."""
        for row, (out_begin, out_end) in zip(self.linears, pairwise(self.out_parts), strict=True):
            for tile, (in_begin, in_end) in zip(row, pairwise(self.in_parts), strict=True):  # type: ignore[call-overload]
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.weight.copy_(other.weight[out_begin:out_end, in_begin:in_end])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[out_begin:out_end])
