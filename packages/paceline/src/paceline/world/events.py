"""`Events`: what happens in a run. Its parts subscribe to it when they are built; nobody patches another object.

    run = Run(...)                                        run.events has one attribute for each event
    run.events.between_batches.subscribe(self.between)    in the constructor of the object that wants to know
    run.events.between_batches()                          where it happens: calls all subscribers

An `Event` is a moment. A `Span` is a stretch of time with a name; its only subscriber has a context manager for each name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

P = ParamSpec("P")


class Event(Generic[P]):
    """A moment, such as the end of an epoch. Its subscribers are called in the order in which they subscribed."""

    def __init__(self) -> None:
        # Keys are compared by identity: the same function may subscribe twice.
        self._subscribers: dict[object, Callable[P, object]] = {}

    def subscribe(self, subscriber: Callable[P, object]) -> Callable[[], None]:
        """Calls `subscriber` from now on. Returns a function that ends this, and that may be called more than once."""
        key = object()
        self._subscribers[key] = subscriber

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def __bool__(self) -> bool:
        """Returns whether anybody subscribed."""
        return bool(self._subscribers)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls all subscribers, because the event happens now."""
        # Over a copy, because a subscriber may unsubscribe itself.
        for subscriber in tuple(self._subscribers.values()):
            subscriber(*args, **kwargs)


class Span:
    """A stretch of time, such as an optimizer's step, which is known by its name."""

    def __init__(self) -> None:
        self._contexts: Mapping[str, AbstractContextManager[object]] = {}

    def subscribe(self, contexts: Mapping[str, AbstractContextManager[object]]) -> None:
        """Enters `contexts[name]` around each stretch of that name from now on."""
        assert not self._contexts, "somebody follows these stretches already"
        self._contexts = contexts

    def __bool__(self) -> bool:
        """Returns whether anybody subscribed."""
        return bool(self._contexts)

    # A step opens six of these: a table of contexts that are used again costs a third of functions which make them.
    def __call__(self, name: str) -> AbstractContextManager[object]:
        """It lasts while the context that is returned is open."""
        return self._contexts.get(name, _NOTHING)


_NOTHING = nullcontext()


@dataclass(frozen=True)
class SavedCheckpoint:
    """What became of a save.

    Attributes:
        step: optimizer steps done when it began.
        path: the checkpoint.
        bytes: of its files; None where it failed.
        stall_s: how long the training loop waited for it, in seconds.
        save_s: from its beginning to its end, in seconds.
        ok: whether it is complete.
        reason: why not.
    """

    step: int
    path: str
    bytes: int | None
    stall_s: float
    save_s: float
    ok: bool = True
    reason: str = ""


@dataclass(frozen=True)
class StepAnomaly:
    """A step whose loss or gradients were out of the ordinary, and what became of it.

    Attributes:
        step: number of the optimizer step, from 1.
        what: "nan", "loss-spike" or "gradient-norm".
        value: the loss or the norm; NaN for "nan".
        limit: what it should not have exceeded; None for "nan".
        action: "log", "skip", "rollback" or "stop".
        text: the line of the log.
    """

    step: int
    what: str
    value: float
    limit: float | None
    action: str
    text: str


class Events:
    """The events of one run.

    Attributes:
        before_step: any optimizer of this process is about to step, prepared or not.
        before_first_step: a prepared optimizer is about to step, for the first time in this run.
        between_batches: every batch of a loader that trains has been used up, and the next was asked for.
        between_evaluation_batches: the next batch of a loader that does not train was asked for, once any trains.
        epoch_over: all batches of a loader that trains were given; its position is still that of the last one.
        phase: a part of the step by name: "data", "forward", "backward", "reduce", "clip", "step", "pipeline", "checkpoint".
        preparing: models were given to `prepare`, to which nothing was done yet.
        prepared: a call of `prepare` has prepared the models that are given here, maybe none, as the plan says.
        logged: values were logged, with a step or None.
        clipped: the norm of the gradients before they were clipped is there.
        saved: a checkpoint is complete, or could not be written; on the main process, maybe on another thread.
        loop_began: a loop over a prepared loader began.
        loop_over: such a loop ended; and whether it was read to its end.
        gathered: the script gathered or reduced values of all ranks, by the method of this name, with this result. Ranks: all.
        trains: a backward pass begins.
        several_batches: from now on a script may have several batches of prepared loaders at the same time.
        outside_loops: the script has left all loops over prepared loaders (True), or does what it does inside of one again.
        backward: a backward pass begins; of a pipeline, it has ended. With the loss of the script, what it adds on this rank to
            the mean over the window and the ranks (without loss scaling), and the script's `num_items`.
        stepped: a prepared optimizer has stepped, or has skipped its step because of an overflow.
        micro_batch: an engine of another library was called with inputs, of a step of so many samples over all ranks.
        kept_on_host: a copy was made in the host's memory of what would else be in the device's.
        anomaly: a step had an anomaly, and it is settled what becomes of it; on every rank.
        uneven_steps: ranks are about to take different numbers of steps (`join_uneven_inputs`). Ranks: all.
    """

    def __init__(self) -> None:
        self.before_step: Event[[Optimizer]] = Event()
        self.before_first_step: Event[[]] = Event()
        self.between_batches: Event[[]] = Event()
        self.between_evaluation_batches: Event[[]] = Event()
        self.epoch_over: Event[[]] = Event()
        self.phase = Span()
        self.loop_began: Event[[Any]] = Event()
        self.loop_over: Event[[Any, bool]] = Event()
        self.gathered: Event[[str, object]] = Event()
        self.trains: Event[[]] = Event()
        self.several_batches: Event[[]] = Event()
        self.outside_loops: Event[[bool]] = Event()
        self.backward: Event[[Tensor, Tensor, object]] = Event()
        self.stepped: Event[[Optimizer]] = Event()
        self.micro_batch: Event[[object, int]] = Event()
        self.kept_on_host: Event[[Tensor]] = Event()
        self.anomaly: Event[[StepAnomaly]] = Event()
        self.preparing: Event[[Sequence[Module]]] = Event()
        self.prepared: Event[[Sequence[Module]]] = Event()
        self.logged: Event[[Mapping[str, object], int | None]] = Event()
        self.clipped: Event[[Tensor]] = Event()
        self.saved: Event[[SavedCheckpoint]] = Event()
        self.uneven_steps: Event[[]] = Event()

    def __reduce__(self) -> tuple[type[Events], tuple[()]]:
        """A copy (of a prepared loader, say) tells nobody: those who subscribed belong to this run."""
        return Events, ()
