"""Wrappers with which a loop that was written for accelerate runs on DeepSpeed's engine; `deepspeed_preparation` makes them.

    accelerator.backward(loss)   DeepSpeedEngineWrapper: the engine's backward, and its step at the end of a window
    optimizer.step()             DeepSpeedOptimizerWrapper: does nothing, because the engine has stepped already
    scheduler.step()             DeepSpeedSchedulerWrapper: does nothing, for the same reason

`DummyOptim` and `DummyScheduler` stand in a script for the optimizer and the scheduler that the DeepSpeed config describes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from paceline.base.errors import ConfigError, TrainError
from paceline_accelerate.deepspeed_plugin import get_active_deepspeed_plugin
from paceline_accelerate.optimizer import AcceleratedOptimizer
from paceline_accelerate.scheduler import AcceleratedScheduler
from paceline_accelerate.state import AcceleratorState, is_initialized
from paceline_deepspeed.engine import DeepSpeedEngine
from paceline_deepspeed.optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam
from paceline_large.optim.lion import Lion


class DummyOptim:
    """Stands for the optimizer that the DeepSpeed config describes.

    Args:
        params: parameters or groups of them, which that optimizer will step.
        lr, weight_decay: values of the config's keys that are "auto".
        kwargs: have no effect.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the scheduler that the DeepSpeed config describes, or that a function makes.

    Args:
        optimizer: a `DummyOptim` or an optimizer.
        total_num_steps, warmup_num_steps: values of the config's keys that are "auto"; steps of all processes together.
        lr_scheduler_callable: makes the scheduler, given the optimizer that the engine has made.
        kwargs: have no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class DeepSpeedEngineWrapper:
    """Calls an engine as accelerate's loops need it.

    Args:
        engine: of `deepspeed.initialize`.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Computes gradients; at the end of a window the engine clips and steps its optimizer and its scheduler.

        Args:
            sync_gradients: whether this micro-batch ends a window.
            kwargs: for `engine.backward`.
        """
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last window's gradients before clipping; None if it was not computed."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else norm.item()

    def refuse_clip_grad_value(self) -> NoReturn:
        """Refuses to clamp gradients.

        Raises:
            TrainError: `deepspeed-step`.
        """
        what = "`clip_grad_value_` has no effect under DeepSpeed."
        fix = "set `gradient_clipping` in the DeepSpeed config, or call `clip_grad_norm_`"
        raise TrainError("deepspeed-step", what, why="`accelerator.backward` has stepped already", fix=fix)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Gives a script access to the engine's optimizer, which the engine itself steps; it clears the gradients too.

    Args:
        optimizer: that of the engine.
    """

    steps_by_windows = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Does nothing: `accelerator.backward` has stepped."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing: the engine clears gradients after its step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine skipped its last step because a gradient overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Gives a script access to the engine's scheduler, which the engine itself steps.

    Args:
        scheduler: that of the engine.
        optimizers: one or several, which it schedules.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `accelerator.backward` has stepped."""


# torch's optimizer -> the one that computes the same on the host.
_ON_THE_HOST: dict[type[Optimizer], Callable[..., Optimizer]] = {
    torch.optim.AdamW: functools.partial(DeepSpeedCPUAdam.build, adamw_mode=True),
    torch.optim.Adam: functools.partial(DeepSpeedCPUAdam.build, adamw_mode=False),
    torch.optim.Adagrad: DeepSpeedCPUAdagrad,
    Lion: Lion,
}


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Returns DeepSpeed's optimizer with states on the host that computes what `optimizer` does, over the same parameters.

    Raises:
        ConfigError: `deepspeed-optimizer`, for an optimizer that is not Adam, AdamW, Adagrad or Lion.
    """
    make_optimizer = _ON_THE_HOST.get(type(optimizer))
    if make_optimizer is None:
        name = type(optimizer).__name__
        mapped = ", ".join(kind.__name__ for kind in _ON_THE_HOST)
        what = f"DeepSpeed has no optimizer for the host that does what {name} does."
        raise ConfigError("deepspeed-optimizer", what, why=f"there is one for: {mapped}", fix=f"keep {name} as it is")
    options = {name: optimizer.defaults[name] for name in ("lr", "weight_decay") if name in optimizer.defaults}
    return make_optimizer(optimizer.param_groups, **options)


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function, which then raises an error in a run that does not use DeepSpeed.

    Raises:
        ConfigError: `deepspeed-plugin`, when the decorated function is called in such a run.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_initialized():
            get_active_deepspeed_plugin(AcceleratorState())
        return func(*args, **kwargs)

    return checked
