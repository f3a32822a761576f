"""`AllocationTrace`: every byte that comes and goes during a run, in order: the peak, and what it is made of.

A tensor's storage is entered when an operation first returns it, and leaves when it is freed or resized. What kind of
memory it was often shows only later (a gradient is one more tensor of the backward pass, until the optimizer reads
it), so kinds are put on afterwards, and the peak is found by going through the entries once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.world.sharded import plain_tensors
from paceline_lens.forecast.reserved import reserved

# Of two kinds that a storage was labelled with, the one that stands first counts.
KINDS = ("parameters", "optimizer", "gradients", "communication", "batches", "activations", "other")


@dataclass(frozen=True)
class Peak:
    """Memory over some part of a run.

    Attributes:
        total: bytes at the peak.
        at_peak: those bytes by kind.
        largest: the most that each kind took at any time, which may be another one.
        reserved: bytes that torch's allocator takes from a device at most, gaps between tensors included; see `reserved`.
    """

    total: int
    at_peak: dict[str, int]
    largest: dict[str, int]
    reserved: int = 0


class AllocationTrace:
    """Entries of storages that came and went.

    Attributes:
        phase: the kind that new storages are entered under.
    """

    def __init__(self) -> None:
        self.phase = "activations"
        self._is_elsewhere = False
        self._entries: list[tuple[int, int]] = []  # (number of the storage, bytes that came or went)
        self._kinds: list[str] = []  # by number
        self._sizes: list[int] = []
        self._streams: list[str] = []  # by number, the stream whose memory it is in
        self._numbers: dict[int, int] = {}  # id of a living storage -> its number
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._elsewhere: set[int] = set()  # numbers of storages in another memory

    def enter(self, tensor: torch.Tensor) -> int:
        """Notes the storage of a tensor, if it is new or has another size; returns its number."""
        storage = tensor.untyped_storage()
        key = id(storage)
        number = self._numbers.get(key)
        if number is None:
            number = len(self._kinds)
            self._numbers[key] = number
            self._kinds.append(self.phase)
            self._sizes.append(0)
            self._streams.append("")
            self._watches[key] = weakref.ref(storage, lambda _: self._leave(key, number))
            if self._is_elsewhere:
                self._elsewhere.add(number)
        self._set_size(number, storage.nbytes())
        return number

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Says that the storage of a tensor is in another memory, which is not counted."""
        number = self.enter(tensor)
        self._set_size(number, 0)
        self._elsewhere.add(number)

    def begin_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """New storages are the optimizer's, until `end_step`. Where all that it steps is in another memory, so are they."""
        self.phase = "other"
        plain = [part for tensor in stepped for part in plain_tensors(tensor).values()]
        self._is_elsewhere = all(self._numbers.get(id(part.untyped_storage())) in self._elsewhere for part in plain)

    def end_step(self) -> None:
        """New storages are of a forward or backward pass again."""
        self.phase = "activations"
        self._is_elsewhere = False

    def on_stream(self, tensor: torch.Tensor, stream: str) -> None:
        """Says that a tensor is in the memory of another stream than that of the model."""
        self._streams[self.enter(tensor)] = stream

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that a storage was resized, as FSDP does with parameters that it gathers."""
        number = self._numbers.get(id(storage))
        if number is not None:
            self._set_size(number, storage.nbytes())
            self._raise_kind(number, "communication")

    def _leave(self, key: int, number: int) -> None:
        self._set_size(number, 0)
        self._numbers.pop(key, None)
        self._watches.pop(key, None)

    def _set_size(self, number: int, size: int) -> None:
        if size != self._sizes[number] and number not in self._elsewhere:
            self._entries.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def label(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Says what kind of memory some tensors are; see `KINDS`."""
        for tensor in tensors:
            for part in plain_tensors(tensor).values():
                self._raise_kind(self.enter(part), kind)

    def _raise_kind(self, number: int, kind: str) -> None:
        if KINDS.index(kind) < KINDS.index(self._kinds[number]):
            self._kinds[number] = kind

    @property
    def mark(self) -> int:
        """A place in the entries, for `peak`."""
        return len(self._entries)

    def peak(self, start: int = 0) -> Peak:
        """Returns the peak after `start` (a `mark`), and what it was made of."""
        now = dict.fromkeys(KINDS, 0)
        living = dict.fromkeys(range(len(self._kinds)), 0)
        for number, change in self._entries[:start]:
            now[self._kinds[number]] += change
            living[number] += change
        total = sum(now.values())
        highest = total
        at_peak = dict(now)
        largest = dict(now)
        for number, change in self._entries[start:]:
            kind = self._kinds[number]
            now[kind] += change
            total += change
            if change > 0:
                largest[kind] = max(largest[kind], now[kind])
                if total > highest:
                    highest = total
                    at_peak = dict(now)
        before = [(number, size) for number, size in living.items() if size]
        return Peak(highest, at_peak, largest, reserved([*before, *self._entries[start:]], self._streams))
