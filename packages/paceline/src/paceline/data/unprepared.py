"""Says once that a training loop runs over a loader that was never prepared, so that every rank reads all samples.

    a backward pass outside of every prepared loop     which DataLoader is being iterated, and what is its dataset?
    the ranks' answers, in the store                   all the same? then rank 0 warns

No rank waits for another: an answer is written once, and rank 0 looks at its later backward passes. Loaders that a script
divides itself (a `DistributedSampler`, an iterable dataset, another dataset on each rank) are none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from paceline.base.log import logger
from paceline.data.loader import PreparedLoader
from paceline.torch_internals.loaders import datasets_in_use
from paceline.world import rendezvous
from paceline.world.places import user_frame
from paceline.world.world import World

_TRIES = 3  # backward passes after which a rank no longer looks: each look takes some ten milliseconds
_LOOKS = 100  # backward passes at which rank 0 looks for the others' answers
_NUMBERS = count()


class UnpreparedLoaders:
    """Looks for a loader that a training loop iterates without having prepared it.

    Args:
        world: the ranks of the run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = next(_NUMBERS)
        self._store: Any = None
        self._passes = 0
        # What this rank iterates without having prepared it, and in which line; "" until it was found.
        self._name = ""
        self._place = ""

    def look(self, prepared: Sequence[PreparedLoader]) -> None:
        """Looks once; a backward pass outside of every loop over a prepared loader calls it.

        Args:
            prepared: the loaders that were prepared.
        """
        self._passes += 1
        if not self._name and self._passes <= _TRIES:
            self._answer({id(loader.original.dataset) for loader in prepared})
        elif self._name and self._world.is_main and self._passes <= _LOOKS:
            self._compare()

    def _answer(self, prepared: set[int]) -> None:
        """Writes into the store which dataset this rank reads, if its loader was not prepared.

        Args:
            prepared: the ids of the datasets of prepared loaders.
        """
        frame = user_frame()
        # `datasets_in_use` lists the datasets that torch's iterators read at the moment. Names of variables then tell which
        # loader it is.
        unprepared = {id(dataset) for dataset in datasets_in_use()} - prepared
        for name, loader in _loaders(frame):
            if id(loader.dataset) in unprepared and not _divided(loader):
                assert frame is not None, "a loader was found in it"
                self._name = name
                self._place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._store = rendezvous.part(f"unprepared/{self._number}")
                self._store.set(str(self._world.rank), _outline(loader.dataset))
                return

    def _compare(self) -> None:
        """Warns if every rank has written the same."""
        # `check` does not wait. Ranks whose loaders are prepared never write, and then there is never a warning.
        keys = [str(rank) for rank in range(self._world.size)]
        if not self._store.check(keys):
            return
        self._passes = _LOOKS
        answers = {self._store.get(key) for key in keys}
        if len(answers) == 1:
            logger("data").warning(
                "%s trains on batches of `%s`, which was not prepared: each of the %d processes reads all of its samples. "
                "Prepare it before the loop: `%s = accelerator.prepare(%s)`.",
                self._place, self._name, self._world.size, self._name, self._name,
            )  # fmt: skip


def iterated_loaders(prepared: Sequence[PreparedLoader]) -> list[DataLoader[Any]]:
    """Returns the unprepared DataLoaders that the script iterates at the moment, if variables of the script refer to them."""
    unprepared = set(map(id, datasets_in_use()))
    unprepared -= {id(loader.original.dataset) for loader in prepared}
    # By `id`: one loader may have several names.
    loaders: dict[int, DataLoader[Any]] = {}
    for _, loader in _loaders(user_frame()):
        if id(loader.dataset) in unprepared:
            loaders[id(loader)] = loader
    return list(loaders.values())


def _loaders(frame: FrameType | None) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yields the variables that hold DataLoaders, in the function of the loop and in its callers."""
    while frame is not None:
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if isinstance(value, DataLoader):
                    yield name, value
        frame = frame.f_back


def _divided(loader: DataLoader[Any]) -> bool:
    """Returns whether the script may divide the samples itself, by a sampler that is none of torch's plain ones."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if not isinstance(outer, BatchSampler) or type(outer).__iter__ is not BatchSampler.__iter__:
        return True
    return isinstance(outer.sampler, DistributedSampler) or not type(outer.sampler).__module__.startswith("torch.")


def _outline(value: object, depth: int = 3) -> str:
    """Returns a text that differs between datasets: types, lengths, first and last values. No sample is read for it."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return f"{list(value.shape)} "  # to look inside would wait for the device
        flat = value.detach().flatten()
        return f"{list(value.shape)} {torch.cat([flat[:4], flat[-4:]]).tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.ravel()[:4]} {value.ravel()[-4:]}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple, range)):
        ends = [_outline(entry, depth - 1) for entry in (*value[:1], *value[-1:])]
        return f"{len(value)} [{', '.join(ends)}]"
    # Datasets may wrap each other, and may refer to themselves. A few levels are enough to tell them apart.
    attributes = getattr(value, "__dict__", {}) if depth else {}
    outlines = [f"{name}: {_outline(attribute, depth - 1)}" for name, attribute in attributes.items()]
    return f"{type(value).__name__}({', '.join(outlines)})"
