"""Random streams of this process: python's, numpy's, torch's and the accelerator's."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch

from paceline.world.generators import generator_states, restore_generators


def capture(device: torch.device) -> dict[str, Any]:
    """States of all random streams of this process.

    Args:
        device: the accelerator whose stream counts, or the CPU.
    """
    version, words, gauss = random.getstate()
    generators = generator_states(device)
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": numpy.random.get_state(legacy=False),
        "torch": generators[0],
        "device": device.type,
    }
    if device.type != "cpu":
        streams["accelerator"] = generators[1]
    return streams


def restore(state: dict[str, Any], device: torch.device) -> bool:
    """Puts back what `capture` gave.

    Returns:
        Whether all streams were restored; false where the state comes from another kind of device, whose stream
        is then left as it is.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy.random.set_state(state["numpy"])
    if device.type not in ("cpu", state["device"]):
        torch.set_rng_state(state["torch"])
        return False
    streams: list[Any] = [state["torch"], state.get("accelerator")]
    restore_generators(streams, device)
    return True


def derive(state: dict[str, Any], rank: int) -> None:
    """Seeds all streams from the state of another rank and this rank's number: for a rank that had none of its own."""
    digest = hashlib.sha256(bytes(state["torch"].tolist()) + str(rank).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
