"""Every module of `torch.nn`, each in a small model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_sweep.runs import FEATURES, WORDS, Case


class Around(nn.Module):
    """A linear layer, a module, and fixed weights that make one value a row of what it returns.

    Args:
        module: gets h [rows, *shape], or the words if `shape` is None.
        shape: of one row of what it gets.
        call: calls the module in another way, with the module, h and words.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...] | None, call: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, torch.Size(shape or (3,)).numel())
        self.module = module
        self.shape, self.call = shape, call

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = self.first(x)
        if self.call is not None:
            output = self.call(self.module, h.reshape(len(x), *(self.shape or (3,))), words)
        elif self.shape is None:
            output = self.module(words)
        else:
            output = self.module(h.reshape(len(x), *self.shape))
        if isinstance(output, tuple):
            output = output[0]
        rows = output.reshape(len(x), -1)
        weights = torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype)
        value = (rows * weights).sum(1)
        return value + h.sum(1) * 0.1


def case(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...] | None,
    call: Any = None,
    plain: Callable[[], nn.Module] | None = None,
) -> Case:
    def model() -> nn.Module:
        return Around(build(), shape, call)

    def plain_model() -> nn.Module:
        return Around((plain or build)(), shape, call)

    return Case(name, model, partial(torch.optim.SGD, lr=0.05), plain_model=plain_model)


class RightBag(nn.EmbeddingBag):
    """A bag that divides gradients by the frequencies of their own rows. torch's kernel for the CPU (2.13) takes other rows'."""

    def forward(self, words: Tensor, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        rows = nn.functional.embedding(words, self.weight, scale_grad_by_freq=True)
        weights = torch.ones(words.shape, dtype=rows.dtype) if per_sample_weights is None else per_sample_weights
        if self.padding_idx is not None:
            weights = weights.masked_fill(words == self.padding_idx, 0.0)
        summed = (rows * weights.unsqueeze(-1)).sum(1)
        if self.mode == "mean":
            return summed / weights.sum(1, keepdim=True).clamp(min=1)
        return summed


def per_bag(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(words, per_sample_weights=h)


def by_offsets(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(words.reshape(-1), torch.arange(0, words.numel(), 3))


BATCH_LAYERS = [
    case("Embedding(max_norm)", lambda: nn.Embedding(WORDS, 4, max_norm=0.5), None),
    case(
        "Embedding(max_norm, norm_type=1, padding_idx)",
        lambda: nn.Embedding(WORDS, 4, padding_idx=2, max_norm=0.5, norm_type=1),
        None,
    ),
    case("Embedding(scale_grad_by_freq)", lambda: nn.Embedding(WORDS, 4, scale_grad_by_freq=True), None),
    case("Embedding(both)", lambda: nn.Embedding(WORDS, 4, max_norm=1.0, scale_grad_by_freq=True, padding_idx=1), None),
    case("EmbeddingBag(max_norm)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5), None),
    case("EmbeddingBag(max_norm, mode=max)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5, mode="max"), None),
    case(
        "EmbeddingBag(scale_grad_by_freq, padding_idx)",
        lambda: nn.EmbeddingBag(WORDS, 4, scale_grad_by_freq=True, padding_idx=3),
        None,
        None,
        lambda: RightBag(WORDS, 4, padding_idx=3),
    ),
    case(
        "EmbeddingBag(scale_grad_by_freq, per_sample_weights)",
        lambda: nn.EmbeddingBag(WORDS, 4, scale_grad_by_freq=True, mode="sum"),
        None,
        per_bag,
        lambda: RightBag(WORDS, 4, mode="sum"),
    ),
    case("EmbeddingBag(max_norm, offsets)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5), None, by_offsets),
    case("InstanceNorm1d(track_running_stats)", lambda: nn.InstanceNorm1d(2, track_running_stats=True), (2, 4)),
    case(
        "InstanceNorm2d(track_running_stats, affine)",
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 2, 3),
    ),
    case(
        "InstanceNorm3d(track_running_stats, momentum)",
        lambda: nn.InstanceNorm3d(2, momentum=0.3, track_running_stats=True),
        (2, 2, 2, 2),
    ),
]
