"""Random streams of this process: python's, numpy's, torch's for the CPU and for the device on which it computes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


def generator_states(device: torch.device) -> list[Tensor]:
    """State of the CPU's generator and, where `device` is no CPU, of the device's; both lie on the CPU.

    Shape: [bytes of the state] each, uint8.
    """
    host = torch.get_rng_state()
    if device.type == "cpu":
        return [host]
    return [host, torch.get_device_module(device).get_rng_state(device)]


def restore_generators(states: Sequence[Tensor], device: torch.device) -> None:
    """Puts back what `generator_states` gave for a device of this kind."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


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
