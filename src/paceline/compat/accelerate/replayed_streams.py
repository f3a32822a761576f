"""Random streams of an earlier moment, for an epoch that is drawn again after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.state import rng

_CPU = torch.device("cpu")


def captured() -> dict[str, Any]:
    """States of this process's random streams, as tensors and plain values: a checkpoint of positions holds nothing else."""
    states = rng.capture(_CPU)
    words = states["numpy"]["state"]["key"]
    states["numpy"]["state"]["key"] = torch.from_numpy(words.astype(np.int64))
    return states


def _restore(states: Mapping[str, Any]) -> None:
    """Puts back what `captured` gave."""
    numpy_state = states["numpy"]
    words = numpy_state["state"]["key"].numpy().astype(np.uint32)
    rng.restore({**states, "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": words}}}, _CPU)


class ReplayedStreams:
    """Random streams of an earlier moment, which a block draws from in the place of the process's own."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Everything inside draws from them; the process's own streams stay where they are."""
        own_states = captured()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = captured()
            _restore(own_states)
