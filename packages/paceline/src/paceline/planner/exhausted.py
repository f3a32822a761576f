"""`ExplainExhaustion` surrounds each pass and each step; where memory does not suffice, `out_of_memory.py` says what to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.world.forward import override_forward

Situation = Callable[[], tuple[Plan, tuple[ModelFacts, ...], int, int]]


# A class, because each step enters several of these: a generator would take a few microseconds more for each.
class ExplainExhaustion(AbstractContextManager[None]):
    """Turns what an allocator raises inside into an error that says what the plan needs.

    Args:
        situation: the plan, the models, ranks in all and ranks on this node; asked for when it happens.
        where: "forward", "backward" or "step".

    Raises:
        OutOfMemory: `out-of-memory`.
    """

    def __init__(self, situation: Situation, where: str) -> None:
        self._situation = situation
        self._where = where

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, (RuntimeError, MemoryError)):
            return
        # A step that fails may take the time to load what explains it.
        from paceline.optim.batch_size import is_out_of_memory
        from paceline.planner.out_of_memory import OutOfMemory, explain
        from paceline.world import failures

        lost = failures.explain(self._where, error)
        if lost is not None:
            raise lost from error
        if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
            raise explain(error, self._where, *self._situation()) from error


def watch(model: nn.Module, situation: Situation) -> None:
    """Makes `model(...)` explain an out-of-memory error; the module stays the same object."""

    def forward(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExplainExhaustion(situation, "forward"):
            return original(*args, **kwargs)

    override_forward(model, "memory_watch", forward)
