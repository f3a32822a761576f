"""The private side of optimizers, schedulers and averages: the order of hooks, marks of steps, the model of `update_bn`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.swa_utils import update_bn

Hook = Callable[..., None]


def complete_hooks(optimizer: Optimizer) -> None:
    """Gives an optimizer the tables of hooks that it lacks because its class does not call `Optimizer.__init__`."""
    if "_optimizer_state_dict_post_hooks" not in vars(optimizer):
        Optimizer.__setstate__(optimizer, {})  # as after unpickling an optimizer of an older torch


def step_inside_of_hooks(optimizer: Optimizer, step: Callable[[], Any], begin: Hook, end: Hook) -> Any:
    """Takes a step with two hooks between those of the user's and the kernels, and returns what the step returns.

    Args:
        step: takes it.
        begin: runs after all hooks before the step.
        end: runs before all hooks after it.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before[id(begin)] = begin
    after[id(end)] = end
    after.move_to_end(id(end), last=False)
    try:
        return step()
    finally:
        del before[id(begin)]
        del after[id(end)]


def step_without_hooks(optimizer: Optimizer) -> None:
    """Calls the step of the optimizer's class without the hooks that torch has wrapped around it."""
    type(optimizer).step.__wrapped__(optimizer)


@contextmanager
def global_hooks_left_out() -> Iterator[None]:
    """While it is open, steps run no hooks that are registered for all optimizers."""
    tables: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooks = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, registered in zip(tables, hooks, strict=True):
            table.update(registered)


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Tells schedulers that the optimizer was stepped: they warn where they are stepped before it."""
    optimizer._opt_called = True


_UPDATE = inspect.unwrap(update_bn).__code__


def model_of_update() -> nn.Module | None:
    """Returns the model whose batch norms torch's `update_bn` updates at the moment, in this thread; None outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _UPDATE:
            model: nn.Module = frame.f_locals["model"]
            return model
        frame = frame.f_back
    return None
