"""Packed documents: several in one row without padding, and attention that stays inside of each.

input_ids      a a a a b b b c c ...      one row of all documents of a batch
position_ids   0 1 2 3 0 1 2 0 1 ...      a position that does not follow the one before it begins a document
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.base.devices import device_type
from paceline.base.errors import DataError, Problem

_NO_TARGET = -100  # the target that losses of torch leave out


def pack_documents(samples: Sequence[Mapping[str, object]]) -> dict[str, Tensor]:
    """Collates documents into one row; the `collate_fn` of a DataLoader with a `TokenBatchSampler`.

    It adds `position_ids`. As models that shift their `labels` themselves expect (transformers), the first label of each
    document becomes -100: no token of one document predicts the next document. Targets that are shifted already have another
    name. An `attention_mask` is left out, since the position ids say all of it.

    Args:
        samples: each a mapping of fields with one value for each token.

    Shape:
        With T = the tokens of all documents: each field [tokens of the document] -> [1, T]; `position_ids` [1, T].

    Raises:
        DataError: `data-pack`.
    """
    fields: dict[str, list[Tensor]] = {}
    positions: list[Tensor] = []
    for number, sample in enumerate(samples):
        values = _fields_of(sample, number)
        length = len(next(iter(values.values())))
        positions.append(torch.arange(length))
        for name, value in values.items():
            if name == "labels":
                value = value.clone()
                value[0] = _NO_TARGET
            fields.setdefault(name, []).append(value)
    incomplete = [name for name, values in fields.items() if len(values) != len(samples)]
    if incomplete:
        raise _not_packable(f"only some documents have the field {incomplete[0]}")
    packed = {name: torch.cat(values).unsqueeze(0) for name, values in fields.items()}
    return {**packed, "position_ids": torch.cat(positions).unsqueeze(0)}


def _fields_of(sample: object, number: int) -> dict[str, Tensor]:
    """Returns the fields of a document that are packed."""
    if not isinstance(sample, Mapping):
        raise _not_packable(f"document {number} of the batch is a {type(sample).__name__}")
    values = {name: torch.as_tensor(value) for name, value in sample.items()}
    mask = values.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise _not_packable(f"the attention_mask of document {number} of the batch has zeros: it is padded")
    values.pop("position_ids", None)
    shapes = {name: list(value.shape) for name, value in values.items()}
    lengths = {tuple(shape) for shape in shapes.values()}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1 or not next(iter(lengths))[0]:
        raise _not_packable(f"the fields of document {number} of the batch have the shapes {shapes}")
    return values


def _not_packable(why: str) -> DataError:
    return DataError(
        "data-pack",
        "these samples cannot be packed.",
        why=why,
        fix='let the dataset return mappings such as {"input_ids": ids, "labels": ids}, all fields of one document with '
        "one value for each of its tokens, and without padding",
    )


def _without_positions(models: Sequence[nn.Module]) -> list[Problem]:
    """Returns the problem of packed batches that no model can take, because it does not know about documents."""
    if not models or any(map(_takes_positions, models)):
        return []
    names = ", ".join(type(model).__name__ for model in models)
    return [Problem(
        "pack-positions",
        "the model cannot take packed documents.",
        f"the forward of {names} has no argument `position_ids`. Without it, attention would see all documents of a row as one",
        "add the argument `position_ids`, and use `PackedDocuments(position_ids).attention(query, key, value)`; or batches "
        "that are not packed: leave out collate_fn=pack_documents",
    )]  # fmt: skip


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(type(model).forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_all or "position_ids" in parameters


# `prepare` asks the function that collates a loader's samples.
cast(Any, pack_documents).problems_with = _without_positions


def packed_tokens(batch: object) -> int | None:
    """Returns the number of tokens of a batch that is one row of packed documents; None for any other batch."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if isinstance(positions, Tensor) and positions.dim() == 2 and len(positions) == 1:
        return positions.numel()
    return None


class PackedDocuments:
    """Where documents begin in packed rows, and attention inside of each of them. Construct it once in a forward pass.

    Args:
        position_ids: the position of each token in its document. Shape: [B, T], rows and tokens.

    Example:
        def forward(self, input_ids, position_ids):
            documents = PackedDocuments(position_ids)
            x = self.embed(input_ids) + self.positions(position_ids)
            for block in self.blocks:
                x = block(x, documents)  # there: documents.attention(query, key, value)
    """

    def __init__(self, position_ids: Tensor) -> None:
        begins = torch.ones_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        self.numbers = begins.cumsum(dim=1)  # of each token's document, from 1 in each row. Shape: [B, T]

    @cached_property
    def mask(self) -> Tensor:
        """Whether a token (dim 2) sees another one (dim 3) of its document, itself or before it. Shape: [B, 1, T, T]."""
        same = self.numbers.unsqueeze(2) == self.numbers.unsqueeze(1)
        return same.tril().unsqueeze(1)

    @cached_property
    def block_mask(self) -> Any:
        """The same for `flex_attention`, which leaves out blocks in which no token sees another one."""
        from torch.nn.attention.flex_attention import create_block_mask

        numbers = self.numbers
        rows, num_tokens = numbers.shape

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (numbers[row, query] == numbers[row, key]) & (query >= key)

        return create_block_mask(sees, rows, None, num_tokens, num_tokens, device=numbers.device)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        """Computes causal attention in which no token sees another document.

        Args:
            query, key, value: as in torch's `scaled_dot_product_attention`.
            scale: of the products; None takes 1 / sqrt(head size).
            enable_gqa: whether fewer heads of keys and values than of queries are allowed.

        Shape: [B, heads, T, head size] each -> [B, heads, T, head size].
        """
        # Other devices compute with the whole mask.
        if device_type(query.device.type).compiles_flex:
            flex = _compiled_flex_attention()
            return flex(query, key, value, block_mask=self.block_mask, scale=scale, enable_gqa=enable_gqa)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, scale=scale, enable_gqa=enable_gqa
        )


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Returns torch's `flex_attention`, compiled: without that it computes all blocks, also those that are left out."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # each batch has another number of tokens
