"""The device of this host, with the rates of the most similar one in the table."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from paceline.world.runtime import Runtime
from paceline_lens.forecast.device import TABLE, Device


def of_this_host(local_size: int, *, cpu: bool = False) -> Device:
    """Returns the device that a rank has here, with the rates of the most similar known one.

    It initializes the accelerator, after which a process cannot be forked. Call it in a child process if that matters.
    """
    device = torch.device("cpu")
    if torch.accelerator.is_available() and not cpu:
        device = torch.accelerator.current_accelerator(check_available=True) or device
    memory = Runtime().memory(device, local_size)
    if device.type == "cpu":
        return replace(TABLE["cpu-64GB"], name="cpu", memory=memory)
    full_name = str(torch.get_device_module(device).get_device_name())
    name = re.sub(r"[\s_]", "", full_name).lower()
    # Names are compared by their model: "nvidiaa100-sxm4-80gb" contains the "a100" of the row "a100-40GB". The first row that
    # matches is used, so the loop runs backwards.
    rates = TABLE["a100-40GB"]
    for row in reversed(TABLE.values()):
        if row.name.partition("-")[0] in name:
            rates = row
    return replace(rates, name=name or device.type, memory=memory)
