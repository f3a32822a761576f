"""Out of memory during a run: what the plan needs, by formulas, and the cheapest plan that needs less.

The error is still torch's `OutOfMemoryError`, with torch's own words in it, so that whoever tries smaller batches upon it
goes on to do so.
"""

from __future__ import annotations

import torch

from paceline.base.errors import Problem, TrainError
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.planner.estimate import Need, choose, estimate, gib, settings_of, shown

# The CPU's allocator, driver calls outside torch's caching allocator, and cuBLAS raise plain RuntimeErrors.
# cuDNN says NOT_SUPPORTED where no algorithm fits into what is left.
_MEMORY_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
                 "CUDNN_STATUS_NOT_SUPPORTED")  # fmt: skip


class OutOfMemory(TrainError, torch.OutOfMemoryError):
    """Memory did not suffice; `code` is `out-of-memory`."""


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an allocator had too little memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(words in message for words in _MEMORY_WORDS)


def explain(
    error: BaseException,
    where: str,
    plan: Plan,
    models: tuple[ModelFacts, ...],
    on_host: bool,
    world_size: int,
    local_size: int,
) -> OutOfMemory:
    """Returns an error that says what the plan needs and what could be changed.

    Args:
        error: the error of the allocator.
        where: "forward", "backward" or "step".
        plan, models, on_host, world_size, local_size: see `Run.situation`.
    """
    need = Need(models, on_host=on_host)
    needed = estimate(plan, need)
    rows = ", ".join(f"{name} {gib(count)}" for name, count in needed.parts.items() if count)
    message = str(error).strip().splitlines() or [type(error).__name__]
    problem = Problem(
        "out-of-memory",
        f"memory did not suffice in the {where} pass." if where != "step" else "memory did not suffice in a step.",
        why=[message[0], f"under {plan.layout} a rank needs {gib(needed.held)} before activations: {rows}"],
        fix=_next(plan, need, needed.held, world_size, local_size),
    )
    explained = OutOfMemory.of([problem])
    assert isinstance(explained, OutOfMemory)
    return explained


def _next(plan: Plan, need: Need, now: int, world_size: int, local_size: int) -> str:
    """Returns the fix: divide more on these ranks, keep fewer activations, or take more ranks."""
    for times in (1, 2, 4, 8):
        size = world_size * times
        near = max(local_size, min(8, local_size * times))
        chosen = choose(need, size, near, now - 1, settings_of(plan), ("replicate", "shard", "zero"))
        if chosen.settings is not None and chosen.estimate is not None:
            flags = shown(chosen.settings)
            if times > 1:
                flags = f"--procs {size} {flags}"
            return f"launch with `{flags}`, which needs {gib(chosen.estimate.held)} a rank before activations"
        if plan.recompute == "no" and any(facts.blocks for facts in need.models):
            return "launch with `--recompute blocks`, which keeps fewer activations"
    return "use a smaller batch with more accumulation, or shorter samples"
