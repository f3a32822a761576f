"""`accelerate.utils.memory`."""

from __future__ import annotations

import gc
from typing import Any

import torch

from paceline.compat.absent import refuse
from paceline.optim import batch_size


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives memory that nobody holds back to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many Nones as objects, for `a, b = release_memory(a, b)`; then the device's cache is emptied."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error is about memory."""
    return batch_size.is_out_of_memory(exception)


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """Calls a function with a batch size that fits, halved until it does."""
    if reduce_batch_size_fn is not None:
        refuse("find_executable_batch_size(reduce_batch_size_fn=...)", "sizes are halved", "leave it out")
    return batch_size.find_executable_batch_size(function, starting_batch_size)
