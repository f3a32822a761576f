"""Where memory does not suffice in a pass or a step, `out_of_memory.py` says what to do; here it is loaded when it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.world.forward import override_forward

Situation = tuple[Plan, tuple[ModelFacts, ...], bool, int, int]


def explain_exhaustion(error: BaseException, where: str, situation: Callable[[], Situation]) -> None:
    """Raises an error that says what the plan needs, if an allocator has raised `error`; the caller raises any other again.

    Args:
        error: was caught around a pass or a step. That of a connection becomes one that says which rank has left.
        where: "forward", "backward" or "step".
        situation: see `Run.situation`; asked for when it happens.

    Raises:
        OutOfMemory: `out-of-memory`.
        CollectiveError: `collective-failed`.
    """
    if not isinstance(error, (RuntimeError, MemoryError)):
        return
    # A step that fails may take the time to load what explains it.
    from paceline.planner.out_of_memory import OutOfMemory, explain, is_out_of_memory
    from paceline.world import failures

    lost = failures.explain(where, error)
    if lost is not None:
        raise lost from error
    if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
        raise explain(error, where, *situation()) from error


def watch(model: nn.Module, situation: Callable[[], Situation]) -> None:
    """Makes `model(...)` explain an out-of-memory error; the module stays the same object."""

    def forward(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            explain_exhaustion(error, "forward", situation)
            raise

    override_forward(model, "memory_watch", forward)
