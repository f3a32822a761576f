"""How the dataset of each rank begins, so that ranks notice that they have prepared others: an unseeded split, a part each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.base.log import warn_once

_SAMPLES = 2
_NUMBERS = 8  # of each tensor of a sample
_INDICES = 64
_CHARACTERS = 60  # of each rank's beginning in the message


def beginning_of(dataset: object) -> Any:
    """Returns indices, numbers and names of the first samples; None where they are only known by loading them.

    Args:
        dataset: a dataset with a length.
    """
    if isinstance(dataset, Subset):
        return [[_plain(index) for index in islice(dataset.indices, _INDICES)], beginning_of(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return beginning_of(dataset.datasets[0])
    if isinstance(dataset, TensorDataset):
        return [_plain(tensor[:_SAMPLES]) if _is_readable(tensor) else None for tensor in dataset.tensors]
    if isinstance(dataset, list | tuple):
        return [_plain(sample) for sample in dataset[:_SAMPLES]]
    return None


def _is_readable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_complex()


def _plain(value: object) -> Any:
    """Returns a value that can be compared and sent; None for others."""
    if isinstance(value, Tensor):
        if not _is_readable(value):
            return None
        numbers = value.detach().flatten()[:_NUMBERS].double().tolist()
        return numbers if value.dim() else numbers[0]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return [_plain(part) for part in list(value.values())[:_NUMBERS]]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value[:_NUMBERS]]
    return value if isinstance(value, str | int | float) else None


def tell_if_they_differ(kind: str, by_rank: Sequence[Any]) -> None:
    """Warns that ranks have prepared datasets that begin with other samples.

    Args:
        kind: the class of the dataset.
        by_rank: what `beginning_of` has returned on each rank.
    """
    others = [rank for rank, beginning in enumerate(by_rank) if not _are_alike(beginning, by_rank[0])]
    if not others:
        return
    shown = "; ".join(f"rank {rank}: {str(by_rank[rank])[:_CHARACTERS]}" for rank in (0, others[0]))
    warn_once(
        "data",
        f"ranks have prepared a {kind} that begins with other samples ({shown}). `prepare` divides one dataset that all "
        "ranks have: with others, some samples are read by no rank, and one may be in the training set of a rank and in the "
        "test set of another. Make the same dataset on each rank: seed what shuffles or splits it, and do not divide it "
        "yourself.",
    )


def _are_alike(one: Any, other: Any) -> bool:
    """Returns whether two beginnings are the same, up to how ranks round what they compute."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-3) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
