"""Splits an object between ranks as accelerate's `split_between_processes` does, which calls `split_part`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from paceline.world.participant import rows_of
from paceline_accelerate.errors import CompatValueError


def split_part(inputs: Any, rank: int, size: int, pad: bool = False) -> Any:
    """Returns the part of `inputs` for `rank` of `size`; if it does not divide evenly, the first ranks get one element more.

    Args:
        inputs: a list, tuple, tensor, `datasets.Dataset` or a dict of those; of a text or a set each rank gets everything.
        rank: number of this rank.
        size: number of ranks.
        pad: whether the last element is repeated so that all parts have the same length.

    Raises:
        CompatValueError: `compat-argument`, if the values of a dict have different lengths.
        TypeError: for inputs without a length.
    """
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            reasons = [f"{key!r} has {length} elements" for key, length in lengths.items()]
            raise CompatValueError(
                "compat-argument",
                "the values of this dict cannot be split alike.",
                why=", ".join(reasons),
                fix="give them one length, or split them one by one",
            )
        length = next(iter(lengths.values()), 0)
    else:
        length = len(inputs)
    return _rows_in(inputs, rows_of(length, rank, size, pad))


def _rows_in(inputs: Any, rows: list[int]) -> Any:
    """Returns the elements with these numbers, without those beyond the end; types that are not split stay whole."""
    if isinstance(inputs, Mapping):
        parts = {key: _rows_in(value, rows) for key, value in inputs.items()}
        if not isinstance(inputs, MutableMapping):
            return parts
        # An `OrderedDict`, or the encoding of a tokenizer, stays one.
        part = copy.copy(inputs)
        part.update(parts)
        return part
    is_dataset = type(inputs).__module__.startswith("datasets.") and hasattr(inputs, "select")
    is_tensor_with_rows = isinstance(inputs, torch.Tensor) and inputs.ndim > 0
    if not (is_dataset or is_tensor_with_rows or isinstance(inputs, list | tuple)):
        return inputs
    rows = [row for row in rows if row < len(inputs)]
    if is_dataset:
        return inputs.select(rows)
    if is_tensor_with_rows:
        return inputs[rows]
    # A slice of a named tuple is a plain tuple, which can be made of an iterable.
    container = type(inputs[:0])
    return container(inputs[row] for row in rows)
