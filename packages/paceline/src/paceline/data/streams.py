"""The random streams of a process: python's, numpy's, torch's for the CPU, and the generators of a loader's own.

A sampler draws from them while it is read. `captured` and `restore` take a moment of them and bring it back, and
`PrivateStreams` lets a `with` block draw from streams that are not the process's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Generators = Sequence[torch.Generator]
States = dict[str, Any]


def captured(generators: Generators = ()) -> States:
    """Returns the states of the process's streams and of some generators, as tensors and plain values alone.

    The positions of loaders are saved with them, and such a file can hold nothing else.
    """
    from paceline.world import random_streams  # most loaders keep no states

    states = random_streams.capture(torch.device("cpu"))
    # numpy's words are uint32, for which torch has few operations.
    words = states["numpy"]["state"]
    words["key"] = torch.from_numpy(words["key"].astype(np.int64))
    return {**states, "generators": [generator.get_state() for generator in generators]}


def restore(states: Mapping[str, Any], generators: Generators = ()) -> None:
    """Sets the process's streams, and some generators, to states that `captured` returned."""
    from paceline.world import random_streams

    words = states["numpy"]["state"]
    key = words["key"].numpy().astype(np.uint32)
    numpy_states = {**states["numpy"], "state": {**words, "key": key}}
    random_streams.restore({"device": "cpu", **states, "numpy": numpy_states}, torch.device("cpu"))
    # Not strict: this script may have another number of generators than the one that was saved.
    for generator, state in zip(generators, states.get("generators", ()), strict=False):
        generator.set_state(state)


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Returns whether two moments of the streams are equal."""
    if not torch.equal(first["torch"], second["torch"]):
        return False
    for name in ("python", "numpy"):
        if not _equal(first[name], second[name]):
            return False
    pairs = zip(first["generators"], second["generators"], strict=False)
    return all(torch.equal(one, other) for one, other in pairs)


def _equal(first: object, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, Mapping):
        return all(_equal(value, second[name]) for name, value in first.items())
    return bool(first == second)


class PrivateStreams:
    """Streams from which a `with` block draws instead of the process's own.

    Args:
        states: the result of `captured`.
        generators: generators that draw from states of their own, too.

    Attributes:
        states: the present states.
    """

    def __init__(self, states: States, generators: Generators = ()) -> None:
        self.states = states
        self._generators = generators

    @contextmanager
    def drawing(self, follow: bool = False) -> Iterator[None]:
        """Draws from these streams in a `with` block, and restores the process's own streams afterwards.

        Args:
            follow: lets the process's own streams go along, where they were equal to these.
        """
        own_states = captured(self._generators)
        before = self.states
        restore(before, self._generators)
        try:
            yield
        finally:
            self.states = captured(self._generators)
            if not (follow and same(own_states, before)):
                restore(own_states, self._generators)


def seeded(seed: int, generators: Generators = ()) -> PrivateStreams:
    """Returns streams that all begin at one seed."""
    own_states = captured(generators)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    for generator in generators:
        generator.manual_seed(seed)
    states = captured(generators)
    restore(own_states, generators)
    return PrivateStreams(states, generators)
