"""States of torch's random generators in this process: the CPU's, and that of the device on which it computes."""

from __future__ import annotations

from collections.abc import Sequence

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
