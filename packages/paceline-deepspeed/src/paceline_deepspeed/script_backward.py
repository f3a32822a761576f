"""Backward passes that a script starts itself: `loss.backward()` in place of `engine.backward(loss)`.

No loss passes through the engine, so hooks on the outputs of its forward pass divide the gradients by the accumulation steps:

    inputs ----> engine(inputs) ----> outputs ----> loss
      <- times steps             <- divided by steps

A gradient that leaves the engine through its inputs is multiplied again, because another engine may have computed them (a GAN)
and divides by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import TrainError
from paceline.torch_internals.dispatch import after_backward_pass
from paceline.world.tree import map_tensors, tensors

# How many backward passes run in this process whose loss was scaled. A loss of one engine may lie behind another's outputs.
_num_scaled_passes = 0


@contextmanager
def scaled_pass() -> Iterator[None]:
    """While it is open, the loss of the backward pass is scaled, so no hook scales gradients."""
    global _num_scaled_passes
    _num_scaled_passes += 1
    try:
        yield
    finally:
        _num_scaled_passes -= 1


def mark_scaled(loss: Tensor, finish: Callable[[], None]) -> None:
    """Marks a scaled loss, on which the script calls `backward` itself: its pass is a `scaled_pass`.

    Args:
        loss: the scaled loss.
        finish: called at the end of its backward pass.
    """

    def begin(_: Tensor) -> None:
        context = scaled_pass()
        context.__enter__()

        def end() -> None:
            context.__exit__(None, None, None)
            _call_last(finish)

        after_backward_pass(end)

    loss.register_hook(begin)


def _call_last(finish: Callable[[], None]) -> None:
    """Calls `finish` after the callbacks of the strategies, which came later than the one that calls this."""
    after_backward_pass(finish)


class ScriptBackward:
    """The hooks of one engine.

    Args:
        begin: called at the begin of each backward pass of the script's, before a parameter gets its gradient; returns the
            factor of the loss.
        finish: called at the end of each such pass.
    """

    def __init__(self, begin: Callable[[], float], finish: Callable[[], None]) -> None:
        self._begin = begin
        self._finish = finish
        self._factor: float | None = None  # of the backward pass that runs

    def hook_inputs(self, inputs: Any) -> Any:
        """Returns inputs for the model, whose gradients are multiplied."""
        return _with_hooks(inputs, self._leave, copies=True)

    def hook_outputs(self, outputs: Any) -> Any:
        """Returns the model's outputs for the script, whose gradients are divided."""
        return _with_hooks(outputs, self._enter, copies=False)

    def _enter(self, gradient: Tensor) -> Tensor:
        if _num_scaled_passes:
            return gradient
        if self._factor is None:
            self._factor = self._begin()
            after_backward_pass(self._end)
        return gradient * self._factor

    def _leave(self, gradient: Tensor) -> Tensor:
        if self._factor is None:
            return gradient
        return gradient / self._factor

    def _end(self) -> None:
        self._factor = None
        _call_last(self._finish)


def _with_hooks(values: Any, hook: Callable[[Tensor], Tensor], *, copies: bool) -> Any:
    """Registers a hook on each tensor that was computed with gradients.

    Args:
        values: tensors, also in tuples, lists, dicts and dataclasses.
        hook: gets the gradient, and returns the one to use.
        copies: whether each tensor gets an alias, which alone has the hook. Several tensors always do: a loss beside the
            logits from which it was computed would otherwise have its gradient divided at both.
    """
    num_hooked = sum(tensor.grad_fn is not None for tensor in tensors(values))
    if not num_hooked or not torch.is_grad_enabled():
        return values
    copies = copies or num_hooked > 1

    def with_hook(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        if copies:
            tensor = tensor.view_as(tensor)
        tensor.register_hook(hook)
        return tensor

    hooked = map_tensors(with_hook, values)
    return hooked if copies else values


def unseen() -> TrainError:
    """Returns the error of a step with gradients of backward passes that the engine has not seen."""
    return TrainError(
        "deepspeed-backward",
        "`engine.step()` would apply gradients of a backward pass that the engine has not seen.",
        why="`loss.backward()` was called on a loss that was not computed from what `engine(inputs)` returned: its gradients "
        "are neither divided by the accumulation steps nor averaged over the ranks",
        fix="write `engine.backward(loss)`",
    )


def unscaled() -> TrainError:
    """Returns the error of a backward pass without the loss scale."""
    return TrainError(
        "deepspeed-loss-scale",
        "`loss.backward()` was called on a loss without the loss scale.",
        why="fp16: gradients are divided by the loss scale before the step, by which this loss was never multiplied",
        fix="write `engine.backward(loss)`, or `engine.scale(loss).backward()`",
    )
