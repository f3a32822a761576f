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

import time
import weakref

import torch
from torch import nn

NAMES = ("data", "forward", "backward", "reduce", "pipeline", "clip", "step", "checkpoint", "rest")
_MOST_READINGS = 100
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
    """Knows which phase of the step runs, and how long each has run so far on this host.

    Attributes:
        listeners: who is told, in order.
        steps: steps that have ended.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.steps = 0
        self._stack: list[str] = []
        self._stepped = False
        self._passed = False
        # Nanoseconds of the phases that have ended. They sum to what lies between these two moments, by which another
        # thread sees whether it has read both at the same time.
        self._ns = dict.fromkeys(NAMES, 0)
        self._began_ns = time.perf_counter_ns()
        self._open = ("rest", self._began_ns)

    # -- for those who read --------------------------------------------------------------------------------------

    @property
    def now(self) -> str:
        """Name of the phase that runs."""
        return self._open[0]

    def times(self) -> tuple[dict[str, int], str, int]:
        """Nanoseconds of each phase so far, all of one moment; the phase that runs, and for how long; on any thread."""
        for _ in range(_MOST_READINGS):
            running, since = self._open
            ns = self._ns.copy()
            if sum(ns.values()) == since - self._began_ns:
                break
            time.sleep(0)  # the training thread is between its two statements
        else:
            # A script that calls its model on several threads at once has mixed up the sums. They hold again from here on.
            self._began_ns = since - sum(ns.values())
        running_ns = time.perf_counter_ns() - since
        ns[running] += running_ns
        return ns, running, running_ns

    # -- for those who train -------------------------------------------------------------------------------------

    def during(self, name: str) -> _Phase:
        """While it is open, `name` runs; it may be opened again, and more than once."""
        return _Phase(self, name)

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
        stack = self._stack
        left = stack.pop()
        self._to(stack[-1] if stack else "rest")
        if left in ("backward", "pipeline") or (left == "reduce" and not stack):
            self._passed = not stack
        elif left == "step":
            self._stepped = True
            for listener in self.listeners:
                listener.stepped()

    def leave_if(self, name: str) -> None:
        """The same, where `name` runs now: an exception may have left it open, or closed it."""
        if self._stack and self._stack[-1] == name:
            self.leave()

    def reduce(self) -> None:
        """The last operation of the backward pass is over: until that ends, it waits for gradients of other ranks."""
        if self._stack and self._stack[-1] == "backward":
            self._stack[-1] = "reduce"
            self._to("reduce")

    def end(self) -> None:
        """Ends the step, where an optimizer has stepped in it."""
        if self._stepped:
            self._stepped = False
            self.steps += 1
            for listener in self.listeners:
                listener.ended()

    def _to(self, name: str) -> None:
        now = time.perf_counter_ns()
        ended, since = self._open
        self._ns[ended] += now - since
        self._open = (name, now)
        for listener in self.listeners:
            listener.to(name)

    # -- joins ---------------------------------------------------------------------------------------------------

    def follow_model(self, model: nn.Module) -> None:
        """Calls of `model` that record gradients are the phase "forward"."""
        owner = weakref.ref(model)
        phases = weakref.ref(self)

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


class _Phase:
    """A phase as a context. `Phases` does not hold it, so that both go as soon as nobody needs them."""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._phases.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._phases.leave()
