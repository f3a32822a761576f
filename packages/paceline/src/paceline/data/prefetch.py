"""Moves batches to the device, one ahead on a stream of its own, so that the copy hides behind the computation."""

from __future__ import annotations

from typing import Any

import torch

from paceline.base.devices import device_type
from paceline.data.feed import Mark, Steps
from paceline.world.tree import tensors, to_device


def on_device(steps: Steps, device: torch.device, non_blocking: bool) -> Steps:
    """The same steps with their batch on `device`; on the CPU the very same iterator.

    Args:
        steps: what a feed gives: batches of any nesting, each with its mark.
        device: where tensors go.
        non_blocking: whether copies from pinned memory return before they are done.
    """
    if device.type == "cpu":
        return steps
    if not device_type(device.type).has_streams:
        return ((to_device(batch, device, non_blocking), mark) for batch, mark in steps)
    return _ahead(steps, device, non_blocking)


def _ahead(steps: Steps, device: torch.device, non_blocking: bool) -> Steps:
    """Yields batches on an accelerator, of which the next one is copied while the current one is computed."""
    side = torch.Stream(device=device)

    def copied() -> tuple[Any, torch.Event, Mark] | None:
        step = next(steps, None)
        if step is None:
            return None
        with side:
            batch = to_device(step[0], device, non_blocking)
        return batch, side.record_event(), step[1]

    ready = copied()
    while ready is not None:
        batch, event, mark = ready
        # The device, and not the host, waits for the copy.
        current = torch.accelerator.current_stream(device)
        current.wait_event(event)
        # Memory that the side stream allocated must not be reused by it while the current stream still reads it.
        for tensor in tensors(batch):
            tensor.record_stream(current)
        ready = copied()  # while the device still computes the step before
        yield batch, mark
