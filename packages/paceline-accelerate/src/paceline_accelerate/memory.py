"""`accelerate.utils.memory`: functions that free memory and that find a batch size that fits."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from paceline.planner.out_of_memory import is_out_of_memory
from paceline_accelerate.errors import CompatRuntimeError, CompatTypeError
from paceline_large.optim import batch_size


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Returns cached memory that no tensor uses to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Empties the device's cache, and returns as many Nones as objects, for `a, b = release_memory(a, b)`."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error is about memory."""
    return is_out_of_memory(exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Calls `function(batch_size, ...)` with sizes that shrink by a tenth until memory suffices.

    A later call begins with the size that fitted last.

    Args:
        function: takes the batch size as its first argument; the caller leaves it out.
        reduce_batch_size_fn: gives the next size; None takes nine tenths of the last one.

    Ranks: where there is a process group all ranks must call; all try the next size if one ran out of memory.

    Raises:
        CompatTypeError: `compat-argument`, where the caller passed a batch size too, or the function takes none.
        CompatRuntimeError: `batch-size-zero`.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size
    num_parameters = len(inspect.signature(function).parameters)

    @wraps(function)
    def search(*args: object, **kwargs: object) -> Any:
        nonlocal size
        clear_device_cache(garbage_collection=True)
        if num_parameters < len(args) + 1:
            raise _too_many(function, args)
        last_error: Any = ""
        while size > 0:
            outcome, result = batch_size.attempt(function, size, args, kwargs)
            if outcome == batch_size.FITS:
                return result
            last_error = result
            clear_device_cache(garbage_collection=True)
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
        raise CompatRuntimeError(
            "batch-size-zero",
            "No executable batch size found, reached zero.",
            why=f"sizes from {starting_batch_size} downwards ran out of memory; the last error: {last_error}",
            fix="use a smaller model, shorter samples, or mixed_precision='bf16'",
        )

    return search


def _too_many(function: Callable[..., Any], args: tuple[object, ...]) -> CompatTypeError:
    """Returns the error for a call with more arguments than the function takes beside the batch size."""
    shown = ", ".join(repr(value) for value in args[1:])
    return CompatTypeError(
        "compat-argument",
        f"Batch size was passed into `{function.__name__}` as the first argument, or it takes none.",
        why="`find_executable_batch_size` passes the batch size as the first argument itself",
        fix=f"define `def {function.__name__}(batch_size, ...)`, and call `{function.__name__}({shown})`",
    )
