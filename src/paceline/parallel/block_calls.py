"""A block's forward with its attention replaced, its arguments one by one, and its trial.

The region arrives in the call's keywords: whoever stands between the hooks and this forward, and calls it again later
(recompute), hands on the same one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.parallel.attention_calls import AttentionCalls
from paceline.parallel.sequence_split import Division, Region, Sizes, sequence_dim
from paceline.world.forward import original_forward, override_forward
from paceline.world.tree import map_tensors, tensors

REGION = "paceline_region"
CACHES = ("past_key_value", "past_key_values", "layer_past")  # transformers' names for kept keys and values
_NAME = "context"
_TRIED = 16  # positions on each rank in a trial


def divide_attention(block: nn.Module) -> None:
    """Makes `block.forward` compute with the attention of the region that comes with the call."""

    def forward(
        block: nn.Module, original: Callable[..., Any], *args: Any, paceline_region: Region | None, **kwargs: Any
    ) -> Any:
        if paceline_region is None:
            return original(*args, **kwargs)
        with AttentionCalls(paceline_region):
            return original(*args, **kwargs)

    override_forward(block, _NAME, forward)


def _plain(block: nn.Module) -> Callable[..., Any]:
    """The block's own forward."""
    original = original_forward(block, _NAME)
    assert original is not None, "divide_attention was not called"
    return original


def map_arguments(
    change: Callable[[Tensor, str, bool], Tensor], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with `change(tensor, parameter, whether it is hidden states)` for each tensor."""
    names = [*inspect.signature(_plain(block)).parameters]
    given = [*zip(names + names[-1:] * len(args), args, strict=False), *kwargs.items()]
    first = _first(names, given)
    hidden = [True]

    def each(name: str, tree: Any) -> Any:
        return map_tensors(lambda tensor: change(tensor, name, name == first and bool(hidden) and hidden.pop()), tree)

    changed = [each(name, tree) for name, tree in given]
    return tuple(changed[: len(args)]), dict(zip(kwargs, changed[len(args) :], strict=True))


def _first(names: list[str], given: list[tuple[str, Any]]) -> str:
    """The parameter that takes hidden states: the first that is given a tensor, in the order of the signature."""
    with_tensors = [name for name, tree in given if tensors(tree)]
    return min(with_tensors, key=lambda name: names.index(name) if name in names else len(names), default="")


def hidden_states(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block.

    Raises:
        TrainError: `context-blocks`.
    """
    found: list[Tensor] = []
    map_arguments(lambda tensor, _, hidden: found.append(tensor) if hidden else None, block, args, kwargs)  # type: ignore[arg-type, return-value, func-returns-value]
    if not found:
        raise TrainError(
            "context-blocks",
            f"{type(block).__name__} is given no tensor whose sequence could be divided.",
            why="hidden states are the first tensor among a block's arguments",
            fix="name the blocks of the transformer with options={'context': {'blocks': 'layers.*'}}",
        )
    return found[0]


# -- the trial -------------------------------------------------------------------------------------------------------


def compare(
    block: nn.Module, sample: Tensor, args: Any, kwargs: Any, region: Region, sizes: Sizes, number: int
) -> None:
    """Runs a block on the beginning of a sequence, whole and divided, without gradients, and compares.

    Args:
        block: with `divide_attention`.
        sample: whole hidden states, the input of the first block.
        args, kwargs: of the call at hand; hidden states are divided already unless `number` is 0.
        region, sizes: of the call at hand.
        number: of the block.

    Ranks: all of the cp group.

    Raises:
        TrainError: `context-differs`, `context-dimension`.
    """
    ranks = region.division.ranks
    length = min(sizes.length // (2 * ranks), _TRIED // 2) * 2 * ranks
    short = replace(region, division=Division(length, ranks, region.division.balanced))
    fewer = replace(sizes, length=length)

    dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), sample.dtype)
    sample = sample.narrow(sizes.dim, 0, length).to(dtype)

    def beginning(tensor: Tensor, name: str, hidden: bool) -> Tensor:
        if hidden:
            return sample
        dim = sequence_dim(tensor, name, sizes)
        tensor = (
            tensor.to(dtype) if tensor.is_floating_point() else tensor
        )  # autocast is off: it would hide differences
        if dim is not None:
            return tensor.narrow(dim, 0, length)
        for dim in (-1, -2):  # of masks
            if tensor.ndim > 1 and tensor.shape[dim] == sizes.length:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    def part(tensor: Tensor, name: str, hidden: bool) -> Tensor:
        dim = fewer.dim if hidden else sequence_dim(tensor, name, fewer)
        return tensor if dim is None else short.split(tensor, dim)

    with torch.no_grad(), _evaluating(block), torch.autocast(sample.device.type, enabled=False):
        args, kwargs = map_arguments(beginning, block, *_without_caches(block, args, kwargs))
        try:
            whole = tensors(_plain(block)(*args, **kwargs))[0]
            args, kwargs = map_arguments(part, block, args, kwargs)
            with AttentionCalls(short):
                divided = tensors(_plain(block)(*args, **kwargs))[0]
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            # torch says so where sizes do not fit: the block wants this dimension whole.
            raise no_sequence(block, list(sample.shape), sizes.dim, str(error).splitlines()[0]) from error
    mine = whole.index_select(sizes.dim, short.own).float()
    change = mine - sample.index_select(sizes.dim, short.own).float() if whole.shape[-1] == sample.shape[-1] else mine
    allowed = (1e-3 if dtype.itemsize > 2 else 2e-2) * change.abs().max() + 8 * torch.finfo(
        whole.dtype
    ).eps * mine.abs().max()
    differs = ((divided.float() - mine).abs().max() > allowed).to(torch.int32)
    dist.all_reduce(differs, group=region.group)
    if differs.item():
        raise TrainError(
            "context-differs",
            f"{type(block).__name__} number {number} gives other numbers for a divided sequence than for a whole one.",
            why="something besides scaled_dot_product_attention mixes positions or counts them: attention by hand, a "
            "convolution or recurrence over the sequence, or rotary angles that the block makes for itself",
            fix="make positions before the blocks and pass them in; if the block is random or counts tokens in evaluation, "
            "too, set options={'context': {'trial': False}}",
        )


def no_sequence(block: nn.Module, shape: list[int], dim: int, reason: str) -> TrainError:
    """The error for hidden states without a dimension that could be divided.

    Args:
        shape: of the hidden states that were tried.
        dim: the dimension that was taken for the sequence.
        reason: what shows that it is none.
    """
    return TrainError(
        "context-dimension",
        f"{type(block).__name__} cannot compute a part of dimension {dim} of its input, so there is no sequence to divide.",
        why=f"cp divides hidden states [batch, sequence, features] along dimension {dim} (option `dim`); these are "
        f"{shape}: {reason}",
        fix="leave `cp` out and use `replicate` or `shard`; for [sequence, batch, features] set "
        "options={'context': {'dim': 0}}",
    )


def keeps(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block is given a cache of keys and values."""
    given = [value for cache, value in zip(_cache_places(block), args, strict=False) if cache]
    return any(value is not None for value in (*given, *(kwargs.get(name) for name in CACHES)))


def _without_caches(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    places = _cache_places(block) + [False] * len(args)
    others = tuple(None if cache else value for cache, value in zip(places, args, strict=False))
    return others, {name: None if name in CACHES else value for name, value in kwargs.items()}


def _cache_places(block: nn.Module) -> list[bool]:
    return [name in CACHES for name in inspect.signature(_plain(block)).parameters]


@contextmanager
def _evaluating(block: nn.Module) -> Iterator[None]:
    """Everything in evaluation, and back to what it was."""
    training = [module for module in block.modules() if module.training]
    block.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
