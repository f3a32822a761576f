"""The entries of one epoch: indices, or batches of indices, which are read from a sampler when they are needed.

One process reads a sampler as torch's DataLoader does: one batch each time the loop asks for one, from the process's own
random streams. So the sampler draws the same numbers at the same moments as in a plain PyTorch script.

Several processes must all see the order of rank 0, and their own streams may differ by then: dropout draws from them. So
rank 0 shares its streams at the beginning of an epoch, and all ranks read the sampler from these. The streams of a rank go
along for as long as they are equal, so that they, too, are those of one process.

An order that is not stored can be read again: `note` has the states of the streams from which it was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch

from paceline.base.errors import DataError
from paceline.data.streams import Generators, PrivateStreams, States, captured, same
from paceline.world.collectives import Collectives

Piece = Sequence[Any] | np.ndarray
_BLOCK = 1 << 20  # indices that are drawn at once: 8 MiB
_COMPARED = 64  # entries at the beginning of an epoch


class Entries:
    """Entries that are read piece by piece; a subclass says how, in `_next`.

    Args:
        length: the number of entries; None if it is not known before all are read.
        keep: this many of the first entries are never forgotten.

    Attributes:
        length: as above; once all entries are read, their number.
        num_read: the number of entries that were read.
    """

    def __init__(self, length: int | None, keep: int) -> None:
        self.length = length
        self.num_read = 0
        self._keep = keep
        self._kept: list[tuple[int, Piece]] = []  # each piece with the number of entries before it
        self._pieces: deque[tuple[int, Piece]] = deque()

    def begin(self) -> None:
        """Called when the iterator of the loader is created, before it has drawn anything. Ranks: all."""

    def size(self, limit: int) -> int:
        """Returns how many of the first `limit` entries there are. Reads them if the length is not known."""
        if self.length is None:
            self._read(limit)
        return min(limit, self.num_read if self.length is None else self.length)

    def cut(self, begin: int, end: int) -> list[Any]:
        """Returns entries `begin` to `end`, or to the last one. They must not be forgotten."""
        if self.num_read < end:
            self._read(end)
        entries: list[Any] = []
        for pieces in (self._kept, self._pieces):
            for offset, piece in pieces:
                if offset >= end:
                    return entries
                if begin < offset + len(piece):
                    part = piece[max(0, begin - offset) : end - offset]
                    # A dataset may not accept numpy's integers as indices; `tolist` makes Python's.
                    entries += part.tolist() if isinstance(part, np.ndarray) else part
        return entries

    def forget(self, before: int) -> None:
        """Frees the memory of entries that are not needed any more."""
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) <= before:
            self._pieces.popleft()

    def settle(self, before: int) -> None:
        """Says that a resume will begin at an entry `before` or later."""

    def note(self) -> Mapping[str, Any]:
        """Returns what is needed to read the same entries again. The same on all ranks."""
        return {}

    def _read(self, limit: int) -> None:
        while self.num_read < limit and (self.length is None or self.num_read < self.length):
            piece = self._next(limit - self.num_read)
            if piece is None:
                self.length = self.num_read
                return
            pieces = self._kept if self.num_read < self._keep else self._pieces
            pieces.append((self.num_read, piece))
            self.num_read += len(piece)

    def _next(self, count: int) -> Piece | None:
        """Returns the next entries, `count` of them or another number; None after the last one."""
        raise NotImplementedError


class Numbered(Entries):
    """The entries 0, 1, 2, ..., of which none is stored."""

    def _next(self, count: int) -> Piece:
        assert self.length is not None
        return range(self.length)


class Shuffle(Entries):
    """What `RandomSampler` draws: permutations of the numbers below `size`, or picks with replacement.

    Args:
        length, keep: see `Entries`.
        size: the number of samples of the source.
        replacement: whether an index may come twice.
        seed: draws the seed of the epoch when the first entry is read. The same on all ranks.
    """

    def __init__(self, length: int, keep: int, size: int, replacement: bool, seed: Callable[[], int]) -> None:
        super().__init__(length, keep)
        self._size = size
        self._replacement = replacement
        self._draw_seed = seed
        self._seed: int | None = None
        self._generator = torch.Generator()

    def _next(self, count: int) -> Piece:
        assert self.length is not None
        if self._seed is None:
            self._seed = self._draw_seed()
            self._generator.manual_seed(self._seed)
        left = self.length - self.num_read
        # numpy cuts and lists 32 indices in 0.6 us, a tensor in 3.5 us.
        if self._replacement:
            return torch.randint(self._size, (min(left, _BLOCK),), generator=self._generator).numpy()
        dtype = torch.int32 if self._size < 2**31 else torch.int64  # half the memory
        # A sampler may ask for more samples than there are. Each sample then comes once in every round.
        return torch.randperm(self._size, generator=self._generator, dtype=dtype).numpy()[:left]

    def note(self) -> Mapping[str, Any]:
        return {} if self._seed is None else {"seed": self._seed}


class Reading(Entries):
    """The entries of any sampler.

    Args:
        keep: see `Entries`.
        sampler: an iterable of indices, or of lists of indices.
        generators: the generators of the loader and the sampler, besides the process's own streams.
        block: the smallest number of entries that are read at once, where nothing is drawn between two batches.
        watch: whether the sampler may draw later than at its first entry.
        early: whether torch creates the sampler's iterator when that of the loader is created, and not at the first entry. It
            does where the sampler is the loader's own; the sampler inside a `BatchSampler` comes later.
        ranks: collectives of all ranks that must see the same entries; None for one process.
        streams: streams of its own from which the sampler draws, a pure function of a seed; None draws as torch does.
        note: what `note` returned where the same epoch was read before.
    """

    def __init__(
        self,
        keep: int,
        sampler: Iterable[Any],
        generators: Generators,
        block: int,
        watch: bool,
        early: bool,
        ranks: Collectives | None,
        streams: PrivateStreams | None,
        note: Mapping[str, Any],
    ) -> None:
        super().__init__(None, keep)
        self._sampler = sampler
        self._generators = generators
        self._block = block
        self._watch = watch
        self._early = early
        self._ranks = ranks
        self._iterator: Iterator[Any] | None = None
        self._ended = False
        self._is_pure = streams is not None
        self._streams = streams  # None: the process's own
        # Where entries were drawn: the states before the sampler's `__iter__`, and (number, states) of entries.
        self._at_iter: States | None = note.get("at_iter")
        self._draws: list[tuple[int, States]] = [(number, states) for number, states in note.get("draws", ())]
        # Entries of an epoch that was read before are read from these states, and those after them as in any epoch.
        self._num_before = int(note.get("num_read", 0))
        self._switches = list(self._draws)

    def begin(self) -> None:
        """Creates the sampler's iterator, if torch does so at this moment."""
        if not self._early or self._iterator is not None:
            return
        is_resumed = self._num_before > 0
        if self._is_pure:
            assert self._streams is not None
            with self._streams.drawing():
                self._iterator = iter(self._sampler)
            return
        if is_resumed:
            replayed = nullcontext() if self._at_iter is None else self._private(self._at_iter).drawing()
            with replayed:
                self._iterator = iter(self._sampler)
            return
        before = self._shared()
        if self._ranks is not None:
            self._streams = self._private(before)
        with self._drawing():
            self._iterator = iter(self._sampler)
        after = captured(self._generators) if self._streams is None else self._streams.states
        if not same(before, after):
            self._at_iter = before

    def settle(self, before: int) -> None:
        # The first draw is kept, since all reading begins there; of the others those that a resume passes.
        passed = [place for place, (number, _) in enumerate(self._draws) if number <= before]
        if len(passed) > 2:
            self._draws[1 : passed[-1]] = []

    def note(self) -> Mapping[str, Any]:
        if self._is_pure:
            return {}
        draws = [[number, states] for number, states in self._draws]
        return {"num_read": self.num_read, "draws": draws, "at_iter": self._at_iter}

    def _next(self, count: int) -> Piece | None:
        if self._ended:
            return None
        if self.num_read < self._num_before:
            entries = self._read_again(count)
        else:
            entries = self._read_on(max(count, self._block))
        return entries or None

    def _taken(self, count: int) -> list[Any]:
        """Returns the next entries of the sampler."""
        if self._iterator is None:
            self._iterator = iter(self._sampler)
        entries = list(islice(self._iterator, count))
        self._ended = len(entries) < count
        return entries

    def _read_on(self, count: int) -> list[Any]:
        if self._num_before and not self._is_pure and self.num_read == self._num_before and self._ranks is None:
            self._streams = None  # the process's own streams have the state that they had when the position was saved
        is_first = self.num_read == 0
        if self._ranks is not None and not self._is_pure and (is_first or self._streams is None):
            # Once more, since the seed of the workers was drawn after `begin`, maybe from the same generator.
            self._streams = self._private(self._shared())
        watches = not self._is_pure and (self._watch or is_first)
        before: States | None = None
        if watches:
            before = captured(self._generators) if self._streams is None else self._streams.states
        with self._drawing():
            entries = self._taken(count)
        if is_first and self._ranks is not None and not self._is_pure:
            self._compare(entries, self._ranks)
        if before is not None:
            after = captured(self._generators) if self._streams is None else self._streams.states
            if not same(before, after):
                self._draws.append((self.num_read, before))
        return entries

    def _compare(self, entries: Sequence[Any], ranks: Collectives) -> None:
        """Compares the first entries of an epoch, which a sampler may choose by what its own rank has seen. Ranks: all.

        Raises:
            DataError: `data-ranks-differ`, on every rank.
        """
        first = [repr(begin) for begin in ranks.gather_object(list(entries[:_COMPARED]))]
        if len(set(first)) == 1:
            return
        others = [f"rank {rank}: {entries[:60]}" for rank, entries in enumerate(first) if entries != first[0]]
        raise DataError(
            "data-ranks-differ",
            f"{type(self._sampler).__name__} gives other samples on other ranks: some would be read twice, others by none.",
            why=[f"an epoch begins with {first[0][:60]} on rank 0", *others[:3]],
            fix="let the sampler choose by what all ranks know: gather first, as in `indices, losses = "
            "accelerator.gather_for_metrics((indices, losses))`",
        )

    def _read_again(self, count: int) -> list[Any]:
        """Reads entries that were read before, from the states of that time."""
        while self._switches and self._switches[0][0] <= self.num_read:
            self._streams = self._private(self._switches.pop(0)[1])
        end = self._switches[0][0] if self._switches else self._num_before
        count = min(end, self._num_before) - self.num_read
        with nullcontext() if self._streams is None else self._streams.drawing():
            return self._taken(count)

    def _shared(self) -> States:
        """Returns the present states of the streams of rank 0. Ranks: all."""
        states = captured(self._generators)
        if self._ranks is not None:
            states = self._ranks.broadcast_object(states)
        return states

    def _private(self, states: States) -> PrivateStreams:
        return PrivateStreams(states, self._generators)

    def _drawing(self) -> AbstractContextManager[None]:
        """The streams from which the next entries are drawn."""
        if self._streams is None:
            return nullcontext()
        return self._streams.drawing(follow=not self._is_pure)
