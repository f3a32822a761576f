"""`TokenBatchSampler`: batches by a number of tokens, in place of a number of samples.

    order of documents   4 1 3 | 2 2 5 | 8 | ...     the next document begins a new batch where it does not fit (9 tokens here)
    global batch         as many of these as there are ranks, or one with `split_batches`
    a rank's batch       consecutive documents of it, such that the largest batch has as few tokens as possible

What lies in a batch depends on the order and the lengths alone, so that all ranks know it without a message. The position
of a loader counts documents as it counts samples anywhere else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from paceline.base.errors import DataError
from paceline.config.keywords import checked_keywords
from paceline.data.divided_batches import DividedBatchSampler, DividedOrder, EntriesOfBatches
from paceline.data.entries import Entries, Piece
from paceline.data.order import Order
from paceline.plan.data import DataPlan
from paceline.plan.plan import Decision
from paceline_large.documents.packing import packed_tokens

Lengths = Sequence[int] | np.ndarray | torch.Tensor


@checked_keywords
class TokenBatchSampler(DividedBatchSampler):
    """Batches of whole documents with at most `tokens` tokens, for `DataLoader(dataset, batch_sampler=...)`.

    A prepared loader gives each rank such a batch. With `split_batches` a batch is that of all ranks together, and each
    gets a part of its documents.

    Args:
        sampler: the order of the documents, such as `RandomSampler(dataset)`; or the dataset, for its own order.
        tokens: the largest number of tokens in a batch.
        lengths: the number of tokens of each document, by its index. None takes the attribute `lengths` of the dataset, or
            its column `length`.

    Raises:
        DataError: `data-lengths`, `data-tokens`.
    """

    def __init__(self, sampler: Sampler[int] | Sized, tokens: int, lengths: Lengths | None = None) -> None:
        if not isinstance(sampler, Sampler):
            sampler = SequentialSampler(sampler)
        self.sampler: Sampler[int] = sampler
        self.tokens = tokens
        self.lengths = _checked_lengths(sampler, lengths)
        _check_budget(tokens, self.lengths)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        left = self.tokens
        for index in self.sampler:
            length = int(self.lengths[index])
            if batch and length > left:
                yield batch
                batch = []
                left = self.tokens
            batch.append(index)
            left -= length
        if batch:
            yield batch

    def __len__(self) -> int:
        """Returns the number of batches. Raises TypeError for an order that is not known before it is drawn."""
        if type(self.sampler).__iter__ is not SequentialSampler.__iter__:
            raise TypeError("how many batches an epoch has depends on its order, which is drawn when the epoch begins")
        return self._num_in_order

    @cached_property
    def _num_in_order(self) -> int:
        return sum(1 for _ in self)

    @property
    def divides(self) -> bool:
        """A subclass that overrides `__iter__` decides itself what is in a batch."""
        return type(self).__iter__ is TokenBatchSampler.__iter__

    @property
    def asked(self) -> Mapping[str, Any]:
        return {"tokens": self.tokens}

    @property
    def facts(self) -> Mapping[str, Any]:
        checksum = zlib.crc32(self.lengths.tobytes())
        return {"tokens, documents, checksum of the lengths": (self.tokens, len(self.lengths), checksum)}

    def order(self, samples: Order) -> TokenBatches:
        return TokenBatches(samples, self)

    def parts(self, samples: Sequence[int], width: int) -> tuple[int, ...]:
        return even_parts(self.lengths[samples].tolist(), width)

    def rows_in(self, batch: object) -> int | None:
        """Packed documents are one row, of another length on each rank: a mean over them is one over tokens."""
        return packed_tokens(batch)

    def decision(self, dataset: str, group: int, width: int) -> Decision:
        batches = "1 batch" if group == 1 else f"{group} batches"
        reason = (
            f"a global batch is {batches} of the sampler; its documents are cut into {width} consecutive parts, one for each "
            "process, such that the largest has as few tokens as possible"
        )
        return Decision(f"data.tokens({dataset})", self.tokens, "derived", reason=reason)


class TokenBatches(DividedOrder):
    """The order of the batches of a `TokenBatchSampler`.

    Args:
        documents: the order of the documents.
        sampler: says how long they are, and how many tokens fit into a batch.
    """

    sampler: TokenBatchSampler

    def __init__(self, documents: Order, sampler: TokenBatchSampler) -> None:
        self.documents = documents
        self.sampler = sampler
        self.source = getattr(documents, "source", ())
        self.generators = list(getattr(documents, "generators", ()))

    def length(self) -> int | None:
        if self.documents.length() == 0:
            return 0
        try:
            return len(self.sampler)
        except TypeError:
            return None

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, object]) -> BatchesOfDocuments:
        return BatchesOfDocuments(self.documents.open(plan, epoch, 0, note), self.sampler)


class BatchesOfDocuments(EntriesOfBatches):
    """The batches of one epoch, each a list of indices.

    Args:
        documents: the epoch's documents.
        sampler: says how long they are, and how many tokens fit into a batch.
    """

    def __init__(self, documents: Entries, sampler: TokenBatchSampler) -> None:
        super().__init__(None, keep=0)
        self._documents = documents
        self._sampler = sampler
        self._bounds = [0]  # documents before each batch
        self._start = 0

    def start_at(self, sample: int) -> None:
        self._start = sample

    def begin(self) -> None:
        self._documents.begin()

    def settle(self, before: int) -> None:
        if before < len(self._bounds):
            self._documents.settle(self._bounds[before])

    def note(self) -> Mapping[str, object]:
        return self._documents.note()

    def _next(self, count: int) -> Piece | None:
        batches: list[list[Any]] = []
        while len(batches) < count:
            batch = self._batch()
            if not batch:
                break
            batches.append(batch)
            self._bounds.append(self._bounds[-1] + len(batch))
        return batches or None

    def _batch(self) -> list[Any]:
        """Returns the next batch; an empty one after the last document."""
        place = self._bounds[-1]
        left = self._sampler.tokens
        batch: list[Any] = []
        while not (batch and place == self._start):
            document = self._documents.cut(place, place + 1)
            if not document:
                break
            length = int(self._sampler.lengths[document[0]])
            if batch and length > left:
                break
            batch += document
            left -= length
            place += 1
            self._documents.forget(place)
        return batch


def even_parts(lengths: Sequence[int], width: int) -> tuple[int, ...]:
    """Returns how many consecutive documents each of `width` ranks gets, such that the largest part is as small as possible.

    No rank is left without a document if there are enough of them.
    """
    low = max([-(-sum(lengths) // width), *lengths])
    high = sum(lengths)
    # The smallest size for which the parts suffice. Greedy parts need no more ranks than any others of that size.
    while low < high:
        middle = (low + high) // 2
        if _num_parts(lengths, middle) <= width:
            high = middle
        else:
            low = middle + 1
    counts = []
    place = 0
    for rank in range(width):
        # One document is left for each of the later ranks, as far as there are so many.
        num_later = width - rank - 1
        end = min(len(lengths), max(place + 1, len(lengths) - num_later))
        left = low
        first = place
        while place < end and lengths[place] <= left:
            left -= lengths[place]
            place += 1
        counts.append(place - first)
    return tuple(counts)


def _num_parts(lengths: Sequence[int], size: int) -> int:
    """Returns the number of consecutive parts of at most `size` tokens."""
    num_parts = 1
    left = size
    for length in lengths:
        if length > left:
            num_parts += 1
            left = size
        left -= length
    return num_parts


def _checked_lengths(sampler: object, lengths: Lengths | None) -> np.ndarray:
    """Returns the length of each document.

    Raises:
        DataError: `data-lengths`.
    """
    dataset = getattr(sampler, "data_source", None)
    if dataset is None:
        dataset = getattr(sampler, "dataset", None)
    fix = "pass them: `TokenBatchSampler(sampler, tokens, lengths=[len(document) for document in documents])`"
    if lengths is None:
        lengths = getattr(dataset, "lengths", None)
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset["length"]  # type: ignore[index]
    if lengths is None:
        raise DataError(
            "data-lengths",
            "a TokenBatchSampler does not know how long the documents are.",
            why=f"{type(dataset or sampler).__name__} has neither an attribute `lengths` nor a column `length`, and to "
            "measure them would read the whole dataset",
            fix=fix,
        )
    numbers = np.asarray(lengths)
    why = ""
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        why = f"they have the shape {list(numbers.shape)} and the dtype {numbers.dtype}"
    elif len(numbers) and numbers.min() < 1:
        why = f"document {int(numbers.argmin())} has {int(numbers.min())} tokens"
    elif dataset is not None and hasattr(dataset, "__len__") and len(dataset) != len(numbers):
        why = f"there are {len(numbers)}, and the dataset has {len(dataset)} documents"
    if why:
        raise DataError(
            "data-lengths",
            "the lengths of the documents are not one whole number above 0 for each document.",
            why=why,
            fix=fix,
        )
    return numbers.astype(np.int64)


def _check_budget(tokens: object, lengths: np.ndarray) -> None:
    """Checks that every document fits into a batch.

    Raises:
        DataError: `data-tokens`.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise DataError(
            "data-tokens",
            f"a batch cannot have {tokens!r} tokens.",
            why=f"tokens = {tokens!r}; it is a whole number above 0",
            fix="pass tokens=8192",
        )
    longer = np.flatnonzero(lengths > tokens)
    if len(longer):
        longest = int(lengths.max())
        shown = ", ".join(f"{index} ({lengths[index]})" for index in longer[:5])
        raise DataError(
            "data-tokens",
            f"{len(longer)} documents are longer than a batch of {tokens} tokens.",
            why=f"by index (and length): {shown}" + (", ..." if len(longer) > 5 else ""),
            fix=f"pass tokens={longest}, or cut these documents",
        )
