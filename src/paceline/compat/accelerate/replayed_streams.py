"""Replays random streams of an earlier moment, so that a resumed run draws the order of the same epoch again.

accelerate's loaders use it for samplers that draw from the process's own streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.state import rng

_CPU = torch.device("cpu")


def captured() -> dict[str, Any]:
    """Returns the states of this process's random streams, as tensors and plain values alone.

    The positions of loaders are saved with them, and such a file can hold nothing else.
    """
    states = rng.capture(_CPU)
    generator_state = states["numpy"]["state"]
    # numpy's words are uint32, for which torch has few operations.
    generator_state["key"] = torch.from_numpy(generator_state["key"].astype(np.int64))
    return states


def _restore(states: Mapping[str, Any]) -> None:
    """Sets this process's random streams to states that `captured` returned."""
    numpy_states = states["numpy"]
    words = numpy_states["state"]["key"].numpy().astype(np.uint32)
    generator_state = {**numpy_states["state"], "key": words}
    numpy_states = {**numpy_states, "state": generator_state}
    rng.restore({**states, "numpy": numpy_states}, _CPU)


class ReplayedStreams:
    """Random streams of an earlier moment, from which a `with` block draws instead of the process's own.

    Args:
        states: the result of `captured`.
    """

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws from these streams in a `with` block, and restores the process's own streams afterwards."""
        own_states = captured()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = captured()
            _restore(own_states)
