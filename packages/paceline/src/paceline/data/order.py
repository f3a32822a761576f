"""The order in which an epoch visits its samples: as torch's samplers draw it, or a pure function of (seed, epoch).

Each order gives one epoch as entries that can be cut anywhere, so that a loader resumes at any sample without loading those
before it. Sequential and shuffled orders are computed. Any other sampler is read as the loop goes (see `entries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.entries import Entries, Numbered, Reading, Shuffle
from paceline.data.streams import seeded
from paceline.plan.data import DataPlan
from paceline.world.collectives import Collectives

_BLOCK = 1 << 16  # entries that are read from a sampler at once, where that changes nothing
_WORD = (1 << 64) - 1


def mix(*values: int) -> int:
    """Returns one seed below 2**63 for several integers. Similar integers, such as (0, 1) and (1, 0), give unrelated seeds.

    It uses the finalizer of splitmix64 (Steele, Lea, Flood 2014).
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


class Order(Protocol):
    """The order of a loader's samples, epoch after epoch."""

    def length(self) -> int | None:
        """Returns the number of entries of an epoch, as far as it is known before they are read."""
        ...

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> Entries:
        """Returns the entries of an epoch.

        Args:
            plan: its seed decides the order, unless the order is drawn (`DataPlan.drawn`).
            epoch: the number of the epoch.
            keep: this many of the first entries are not forgotten.
            note: what `Entries.note` returned, if the epoch was begun before; empty otherwise.
        """
        ...


class Sequential:
    """The indices 0, 1, 2, ... of a source, whose length may change between epochs."""

    def __init__(self, source: Sized) -> None:
        self.source = source

    def length(self) -> int:
        return len(self.source)

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> Entries:
        return Numbered(len(self.source), keep)


class Shuffled:
    """What `RandomSampler` draws where it has no generator: permutations of a source, or picks with replacement.

    Args:
        sampler: says how many samples an epoch has, and whether an index may come twice.
        ranks: collectives of all ranks that must see the same order; None for one process.
    """

    def __init__(self, sampler: RandomSampler, ranks: Collectives | None) -> None:
        self.source = sampler.data_source
        self._sampler = sampler
        self._ranks = ranks

    def length(self) -> int:
        return self._sampler.num_samples

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> Entries:
        def seed() -> int:
            if not plan.drawn:
                return mix(plan.seed, epoch)
            if "seed" in note:
                return int(note["seed"])
            # As the sampler does it. Each rank draws, so that the streams of all ranks advance alike.
            own = int(torch.empty((), dtype=torch.int64).random_().item())
            return own if self._ranks is None else int(self._ranks.broadcast_object(own))

        return Shuffle(self._sampler.num_samples, keep, len(self.source), self._sampler.replacement, seed)


class Redistributed:
    """The order that a `DistributedSampler` divides over its ranks.

    Its own seed and epoch decide it, where the order is drawn.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.source: Any = sampler.dataset
        self._sampler = sampler
        self._epoch = ToldEpoch(sampler)

    def length(self) -> int:
        return len(self.source)

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> Entries:
        if not self._sampler.shuffle:
            return Numbered(len(self.source), keep)
        self._epoch.tell(epoch)
        own = self._sampler.seed + self._sampler.epoch

        def seed() -> int:
            if not plan.drawn:
                return mix(plan.seed, epoch)
            return int(note.get("seed", own))

        return Shuffle(len(self.source), keep, len(self.source), False, seed)


class Read:
    """Any other sampler, or a batch sampler, which is read as the loop goes.

    Args:
        sampler: an iterable of indices, or of lists of indices.
        generator: the loader's own generator, if it has one.
        ranks: collectives of all ranks that must see the same order; None for one process.
        early: see `Reading`.
    """

    def __init__(
        self, sampler: Any, generator: torch.Generator | None, ranks: Collectives | None, early: bool = False
    ) -> None:
        self._early = early
        self.sampler = sampler
        self.generators = _generators(sampler)
        if generator is not None and not any(generator is other for other in self.generators):
            self.generators.append(generator)
        self._ranks = ranks
        self._epoch = ToldEpoch(sampler)

    def length(self) -> int | None:
        # A sampler need not have a length, and the length of a sampler around another one may ask for that of the other.
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> Entries:
        self._epoch.tell(epoch)
        # torch's own samplers draw everything at their first entry, so that more can be read at once. Nobody else's are read
        # ahead on one process, since they may draw, or look at what the script does, at each batch.
        draws_once = type(self.sampler).__iter__ in (SubsetRandomSampler.__iter__, WeightedRandomSampler.__iter__)
        block = _BLOCK if draws_once or not plan.drawn else 1
        streams = None
        if not plan.drawn:
            streams = seeded(mix(plan.seed, epoch), self.generators)
        return Reading(
            keep, self.sampler, self.generators, block, not draws_once, self._early, self._ranks, streams, note
        )


class ToldEpoch:
    """Tells a sampler with `set_epoch` which epoch begins, as training loops do, unless the script itself does it.

    Args:
        sampler: any sampler. One with a true `is_told_by_script` is left to the script from the beginning.
    """

    def __init__(self, sampler: object) -> None:
        self._set_epoch = getattr(sampler, "set_epoch", None)
        self._sampler = sampler
        self._last = getattr(sampler, "epoch", None)
        self._script_tells = bool(getattr(sampler, "is_told_by_script", False))

    def tell(self, epoch: int) -> None:
        """Calls the sampler's `set_epoch`, if it has one."""
        if not callable(self._set_epoch):
            return
        # An epoch that is not the one that was told here comes from the script.
        self._script_tells |= getattr(self._sampler, "epoch", None) != self._last
        if not self._script_tells:
            self._set_epoch(epoch)
            self._last = getattr(self._sampler, "epoch", None)


def _generators(sampler: object) -> list[torch.Generator]:
    """Returns the CPU generators of a sampler, and of the sampler inside it."""
    generators = []
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            generators.append(generator)
        sampler = getattr(sampler, "sampler", None)
    return generators


def order_of(sampler: Any, generator: torch.Generator | None, ranks: Collectives | None, early: bool = False) -> Order:
    """Returns the order of a sampler. A `DistributedSampler` is replaced with a warning.

    Args:
        sampler: the sampler of indices.
        generator: the loader's own generator, if it has one.
        ranks: collectives of all ranks that must see the same order; None for one process.
        early: see `Reading`.

    Raises:
        DataError: `data-sampler-sharded`, where a sampler of another kind already gives each rank its own part.
    """
    # A subclass that overrides `__iter__` draws another order than its base class. So the methods are compared.
    draws = type(sampler).__iter__
    if draws is SequentialSampler.__iter__:
        return Sequential(sampler.data_source)
    if draws is RandomSampler.__iter__:
        # With a generator of its own it draws from that, more than once where it is asked for more samples than there are.
        if sampler.generator is None:
            return Shuffled(sampler, ranks)
        return Read(sampler, generator, ranks, early)
    if draws is DistributedSampler.__iter__:
        if sampler.num_replicas == 1:
            return Redistributed(sampler)
        warn_once(
            "data",
            "prepare divides the samples over the ranks itself, and so replaces the loader's "
            "DistributedSampler: `shuffle=True` in its place does the same.",
        )
        return Redistributed(sampler)
    check_unsharded(sampler)
    return Read(sampler, generator, ranks, early)


def first_entry(sampler: Any) -> Any:
    """Returns the first entry of a sampler, or None, and leaves the random streams as they are."""
    if isinstance(sampler, list | tuple):
        return sampler[0] if sampler else None
    with seeded(0, _generators(sampler)).drawing():
        iterator = iter(sampler)
        # An object that is its own iterator would lose the entry.
        return None if iterator is sampler else next(iterator, None)


def check_unsharded(sampler: object) -> None:
    """Refuses a sampler that gives each rank a part of its own.

    Raises:
        DataError: `data-sampler-sharded`.
    """
    num_replicas = getattr(sampler, "num_replicas", 1)
    if num_replicas not in (1, None):
        raise DataError(
            "data-sampler-sharded",
            f"{type(sampler).__name__} already divides the samples over {num_replicas} ranks.",
            why="prepare divides them too, so that each rank would see a part of its part",
            fix="pass a sampler of the whole order (num_replicas=1), or none",
        )


def seed_of(sampler: object, generator: torch.Generator | None, seed: int) -> int:
    """Returns the seed of the order: that of the user's generator or DistributedSampler if there is one, else `seed`."""
    generators = _generators(sampler)
    # The loader's generator comes first: with `shuffle=True`, torch gives it to the sampler.
    if generator is not None:
        return generator.initial_seed()
    if generators:
        return generators[0].initial_seed()
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    if isinstance(inner, DistributedSampler) and inner.seed:
        return inner.seed
    return seed
