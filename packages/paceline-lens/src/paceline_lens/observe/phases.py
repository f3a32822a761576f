"""`Phases`: which part of a training step runs at the moment. What measures a run listens to it.

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

from paceline.run.run import Run

NAMES = ("data", "forward", "backward", "reduce", "pipeline", "clip", "step", "checkpoint", "rest")
_MOST_READINGS = 100
_BEGIN = ("data", "forward", "backward", "pipeline")  # with one of these a step begins, after an optimizer has stepped


class PhaseListener:
    """The base class of what measures a run; subclasses override some of the methods.

    They are called on the training thread, and `to` also on a thread that runs backward passes.
    """

    def to(self, phase: str) -> None:
        """A phase has begun."""

    def micro_batch(self) -> None:
        """A micro-batch has ended: its backward pass was over before, and another phase begins now."""

    def stepped(self) -> None:
        """An optimizer has stepped. Ranks: all."""

    def ended(self) -> None:
        """A step has ended, and the next one begins."""


class Phases:
    """Records which phase of the step runs, and how long each has run so far on this host.

    Attributes:
        listeners: they are called in this order.
        steps: the number of steps that have ended.
    """

    def __init__(self) -> None:
        self.listeners: list[PhaseListener] = []
        self.steps = 0
        self._stack: list[str] = []
        self._stepped = False  # an optimizer has stepped in this step
        self._passed = False  # the backward pass of the micro-batch is over
        # Nanoseconds of the phases that have ended. They sum to what lies between these two moments, by which another
        # thread sees whether it has read both at the same time.
        self._ns = dict.fromkeys(NAMES, 0)
        self._began_ns = time.perf_counter_ns()
        self._open = ("rest", self._began_ns)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def now(self) -> str:
        """Name of the phase that runs."""
        return self._open[0]

    def times(self) -> tuple[dict[str, int], str, int]:
        """Returns the nanoseconds of each phase so far, the phase that runs, and for how long it has run.

        All three are of the same moment. Any thread may call it.
        """
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

    # -- recording -----------------------------------------------------------------------------------------------

    def during(self, name: str) -> _Phase:
        """Returns a context in which the phase `name` runs. It can be entered again, also inside itself."""
        return _Phase(self, name)

    def enter(self, name: str) -> None:
        """Begins a phase, which runs until `leave`."""
        if self._passed and name != "reduce" and not self._stack:
            self._passed = False
            for listener in self.listeners:
                listener.micro_batch()
        if self._stepped and name in _BEGIN:
            self.end()
        self._stack.append(name)
        self._to(name)

    def leave(self) -> None:
        """Ends the phase that runs; the one around it goes on."""
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
        """Ends the phase `name` if it runs now; after an exception it may have ended already."""
        if self._stack and self._stack[-1] == name:
            self.leave()

    def reduce(self) -> None:
        """Turns "backward" into "reduce", after the last operation of the backward pass: the rest of it is communication."""
        if self._stack and self._stack[-1] == "backward":
            self._stack[-1] = "reduce"
            self._to("reduce")

    def end(self) -> None:
        """Ends the step, if an optimizer has stepped in it."""
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
        """Makes "forward" the phase of calls of `model` that record gradients."""
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


def follow_phases(run: Run) -> Phases:
    """Returns the phases of a run's steps; from the first call on they are recorded."""
    if isinstance(run.phases, Phases):
        return run.phases
    phases = Phases()
    run.follow_phases(phases, {name: phases.during(name) for name in NAMES})
    return phases


class _Phase:
    """A phase as a context. `Phases` has no reference to it, so that no reference cycle keeps both in memory."""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._phases.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._phases.leave()
