"""`find_executable_batch_size`: runs a function with a batch size that fits, halving it on each out-of-memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from paceline.base.errors import ConfigError, TrainError
from paceline.config.keywords import checked_keywords
from paceline.planner.out_of_memory import is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")
Sized = Callable[Concatenate[int, P], R]

# Outcomes of a call. The highest one of all ranks counts.
FITS = 0
_OUT_OF_MEMORY = 1
_FAILED = 2


@overload
def find_executable_batch_size(function: Sized[P, R], starting_batch_size: int = 128) -> Callable[P, R]: ...
@overload
def find_executable_batch_size(
    function: None = None, starting_batch_size: int = 128
) -> Callable[[Sized[P, R]], Callable[P, R]]: ...
@checked_keywords
def find_executable_batch_size(function: Callable[..., Any] | None = None, starting_batch_size: int = 128) -> Any:
    """Calls `function(batch_size, ...)`, halving `batch_size` until memory suffices.

    Create model, optimizer and loaders inside the function, and call `accelerator.free_memory()` first. Objects from outside
    of the function stay in memory.

    Args:
        function: takes the batch size as its first argument; the caller leaves it out.
        starting_batch_size: the first size to try, in samples.

    Returns:
        The function without its first argument; a decorator if `function` is None.

    Ranks: all, if there is a process group. If one of them runs out of memory, all try the next size.

    Raises:
        ConfigError: `batch-size-function`, `batch-size-start`.
        TrainError: `batch-size-zero`, where even one sample does not fit; `batch-size-peer`, where another rank failed.

    Example:
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size):
            loader = DataLoader(dataset, batch_size=batch_size)
            ...

        train()
    """
    if function is None:
        return partial(find_executable_batch_size, starting_batch_size=starting_batch_size)
    _check(function, starting_batch_size)

    @wraps(function)
    def search(*args: object, **kwargs: object) -> Any:
        size = starting_batch_size
        while size:
            outcome, result = attempt(function, size, args, kwargs)
            if outcome == FITS:
                return result
            size //= 2
            free()
        raise TrainError(
            "batch-size-zero",
            f"{function.__name__} runs out of memory even with one sample.",
            why=f"tried every size from {starting_batch_size} down to 1, halving; the last error: {result}",
            fix="use a smaller model, shorter samples, or mixed_precision='bf16'",
        )

    return search


def attempt(
    function: Callable[..., R], size: int, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[int, R | str]:
    """Calls the function once. Returns the worst outcome of all ranks, and the result or the text of the error. Ranks: all."""
    try:
        result: R | str = function(size, *args, **kwargs)
        outcome = FITS
    except Exception as error:
        if not is_out_of_memory(error):
            _worst(_FAILED)  # the other ranks wait for this rank's outcome
            raise
        # The text alone: the error itself would keep every tensor of its frames alive.
        outcome = _OUT_OF_MEMORY
        result = str(error).strip()
    worst = _worst(outcome)
    if worst == _FAILED:
        raise TrainError(
            "batch-size-peer",
            f"another rank failed while trying a batch size of {size}.",
            why="it raised an error that is not about memory",
            fix="see that rank's own error",
        )
    if worst != outcome:
        result = "another rank ran out of memory"
    return worst, result


def _worst(outcome: int) -> int:
    """Returns the highest outcome of all ranks. Ranks: all."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return outcome
    outcomes = [outcome] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return max(outcomes)


def free() -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _check(function: Callable[..., Any], start: int) -> None:
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise ConfigError(
            "batch-size-start",
            f"{start!r} cannot be the first batch size.",
            why=f"starting_batch_size = {start!r}; it is a whole number of samples, 1 or more",
            fix="find_executable_batch_size(starting_batch_size=128)",
        )
    if not signature(function).parameters:
        raise ConfigError(
            "batch-size-function",
            f"{function.__name__} takes no batch size.",
            why="find_executable_batch_size calls it with the batch size as its first argument",
            fix=f"def {function.__name__}(batch_size): ...",
        )
