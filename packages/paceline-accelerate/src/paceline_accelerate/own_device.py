"""The device of this host."""

from __future__ import annotations

import torch


def own_device() -> torch.device:
    """Returns the kind of accelerator of this host; the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
