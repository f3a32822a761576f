"""`Phases`: which part of a training step runs at the moment; whoever measures listens to it.

    rest -> data -> rest -> forward -> rest -> backward -> reduce -> rest -> clip -> rest -> step -> rest -> (data ...)
    |------------------------------ one step: `accumulate` micro-batches ------------------------------|

At each moment there is one phase, the innermost; so the phases of a step sum to the step. A step ends where, after an
optimizer has stepped, the next batch is asked for, or the next forward or backward pass begins.

reduce      from the last operation of the backward pass to gradients that are final: communication that nothing hid
checkpoint  while the loop waits for a save
pipeline    between the computations of a pipeline's stages: waiting for and talking to other stages
rest        everything else: the loss, schedulers, logging, evaluation
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from paceline.torch_internals.dispatch import after_backward_pass

NAMES = ("data", "forward", "backward", "reduce", "pipeline", "clip", "step", "checkpoint", "rest")
_BEGIN = ("data", "forward", "backward", "pipeline")  # with one of these a step begins, after an optimizer has stepped


class Listener:
    """Whoever measures overrides some of these.

    Every method is called on the thread that trains, `to` also on one that runs backward passes.
    """

    def to(self, phase: str) -> None:
        """`phase` runs from now on."""

    def micro_batch(self) -> None:
        """The micro-batch whose backward pass ended before has ended too: something else begins now."""

    def stepped(self) -> None:
        """An optimizer has stepped. Ranks: all come here."""

    def ended(self) -> None:
        """The step has ended; what comes is of the next one."""


class Phases:
    """Tells listeners which phase of the step runs.

    Attributes:
        now: name of the phase.
        listeners: who is told, in order.
        steps: steps that have ended.
    """

    def __init__(self) -> None:
        self.now = "rest"
        self.listeners: list[Listener] = []
        self.steps = 0
        self._stack: list[str] = []
        self._stepped = False
        self._passed = False
        self._contexts = {name: _Phase(self, name) for name in NAMES}

    # -- for those who train -------------------------------------------------------------------------------------

    def during(self, name: str, inside: AbstractContextManager[Any] | None = None) -> AbstractContextManager[Any]:
        """While it is open, `name` runs; `inside` is entered too."""
        if inside is None:
            return self._contexts[name]
        stack = ExitStack()
        stack.enter_context(self._contexts[name])
        stack.enter_context(inside)
        return stack

    def enter(self, name: str) -> None:
        """From here on `name` runs, until `leave`."""
        if self._passed and name != "reduce" and not self._stack:
            self._passed = False
            for listener in self.listeners:
                listener.micro_batch()
        if self._stepped and name in _BEGIN:
            self.end()
        self._stack.append(name)
        self._to(name)

    def leave(self) -> None:
        """What ran before goes on."""
        left = self._stack.pop()
        self._to(self._stack[-1] if self._stack else "rest")
        if left in ("backward", "pipeline") or (left == "reduce" and not self._stack):
            self._passed = not self._stack
        elif left == "step":
            self._stepped = True
            for listener in self.listeners:
                listener.stepped()

    def leave_if(self, name: str) -> None:
        """The same, where `name` runs now: an exception may have left it open, or closed it."""
        if self._stack[-1:] == [name]:
            self.leave()

    def swap(self, name: str) -> None:
        """`name` runs in the place of what runs now."""
        if self._stack:
            self._stack[-1] = name
            self._to(name)

    def end(self) -> None:
        """Ends the step, where an optimizer has stepped in it."""
        if self._stepped:
            self._stepped = False
            self.steps += 1
            for listener in self.listeners:
                listener.ended()

    def _to(self, name: str) -> None:
        self.now = name
        for listener in self.listeners:
            listener.to(name)

    # -- joins ---------------------------------------------------------------------------------------------------

    def follow_model(self, model: nn.Module) -> None:
        """Calls of `model` that record gradients are the phase "forward"."""
        owner, phases = weakref.ref(model), weakref.ref(self)

        def before(module: nn.Module, _: object) -> None:  # no method: a copy of the model copies its hooks
            own = phases()
            if own is not None and module is owner() and torch.is_grad_enabled():
                own.enter("forward")

        def after(module: nn.Module, _: object, __: object) -> None:
            own = phases()
            if own is not None and module is owner() and torch.is_grad_enabled():
                own.leave_if("forward")

        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after, always_call=True)

    def follow_loss(self, loss: torch.Tensor) -> None:
        """In the backward pass of `loss` what comes after its last operation is the phase "reduce".

        Callbacks that autograd runs at the end run in the order in which they came: this one before those that wait for
        gradients, of DDP and FSDP2.
        """

        # A hook on the node takes half the time of one on the tensor, which makes a handle and a table for each loss.
        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(self._backward_begins)

    def _backward_begins(self, gradients: object) -> None:
        after_backward_pass(self._last_operation_over)

    def _last_operation_over(self) -> None:
        if self._stack[-1:] == ["backward"]:
            self.swap("reduce")


class _Phase:
    """A phase as a context, kept and used again; it may be open more than once."""

    def __init__(self, owner: Phases, name: str) -> None:
        self._owner, self._name = weakref.proxy(owner), name

    def __enter__(self) -> None:
        self._owner.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._owner.leave()
