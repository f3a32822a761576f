"""Preemption: after SIGTERM all ranks stop after the same step, save, and leave with an exit code of its own.

    SIGTERM     noted, never raised: the step at hand goes on
    step ends   the rank that was asked writes into the store after which step all stop: a little ahead of itself
    every rank  looks into the store at the end of a step, and stops at the one that stands there
    stop        save_state -> one line -> sys.exit(PREEMPTED), through every `finally`

No collective is needed, because gradients are averaged in every step: a rank that has come to the end of step n knows
that all others have come to the end of step n - 2 at least (n - 1 where collectives wait for each other on the host). What
one of them wrote there is in the store by now. So a stop two steps ahead is seen by all in time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from types import FrameType
from typing import Any

import torch

from paceline.base.errors import TrainError
from paceline.base.exits import PREEMPTED
from paceline.base.log import logger
from paceline.optim.accumulate import Accumulation
from paceline.world import rendezvous
from paceline.world.collectives import Collectives

LEAD = 2  # steps that one rank may be ahead of another
PACED = 32  # the step after which rank 0 says how often to look
_LOOK_S, _MOST = 0.1, 32  # about this often, but at every 32nd step at least
_SAME_S = 1.0  # a launcher and a batch system may both pass on one request
_numbers = count()


class Agreement:
    """Finds the step after which all ranks stop.

    Args:
        store: shared by the ranks, for this alone.
        rank: of this process.
        device: what computes. Its host is kept from running more than a step ahead of it, which bounds `LEAD`.
    """

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        self._store, self._rank, self._device = store, rank, device
        self._step, self._every, self._told = 0, 1, False
        self._half = 0.0  # when half of the steps before `PACED` were over
        self._event: torch.Event | None = None

    def reached(self, asked: bool) -> bool:
        """Whether to stop here, at the end of a step.

        Args:
            asked: whether this rank was asked to.

        Ranks: all, at the end of each step. Costs one look into the store, at every step or less often.

        Raises:
            TrainError: `preemption-apart`.
        """
        self._wait_for_device()
        self._step += 1
        self._pace()
        step = self._step
        if asked and not self._told and not PACED <= step < PACED + LEAD:  # in between the pace is not known to all
            stop = -(-(step + LEAD) // self._every) * self._every
            self._store.compare_set("stop", "", str(stop))
            self._told = True
        if step % self._every:
            return False
        found = bytes(self._store.compare_set("stop", "?", "?")).decode()  # as it stands, in one round trip
        if found == "?" or step < int(found):
            return False
        if step > int(found):
            raise TrainError(
                "preemption-apart",
                "the ranks cannot stop at one step.",
                why=f"after SIGTERM they were to stop after step {found} since `resume()`; rank {self._rank} was at "
                f"{step} already: in this loop ranks take steps without waiting for each other",
                fix="average the steps of all ranks with `LocalSGD`, which says when they are alike; or save by yourself",
            )
        return True

    def _pace(self) -> None:
        if self._step == PACED // 2:
            self._half = time.monotonic()
        if self._step == PACED and self._rank == 0:
            seconds = (time.monotonic() - self._half) / (PACED - PACED // 2)
            self._store.set("every", str(max(1, min(_MOST, int(_LOOK_S / max(seconds, 1e-6))))))
        if self._step == PACED + LEAD:
            self._every = int(self._store.get("every"))

    def _wait_for_device(self) -> None:
        if self._device.type == "cpu":
            return
        if self._event is not None:
            self._event.synchronize()
        self._event = torch.Event(device=self._device)
        self._event.record()


class Preemption:
    """Saves and leaves after SIGTERM.

    Args:
        optimizers: prepared; one that has stepped marks the end of a step.
        gradients: knows whether a window is open.
        collectives: the ranks that stop together.
        device: what computes.
        save: saves under an automatic name; returns it.

    Attributes:
        over: whether it has saved, or `end` was called.

    Ranks: all make one, and call `between` between their batches.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        gradients: Accumulation,
        collectives: Collectives,
        device: torch.device,
        save: Callable[[], str | None],
    ) -> None:
        self._optimizers, self._gradients, self._save = optimizers, gradients, save
        self._world = collectives.world
        self._steps = self._taken()
        self._asked: float | None = None  # when
        self.over = False
        number = next(_numbers)
        self._agreement = None
        if self._world.size > 1:
            self._agreement = Agreement(rendezvous.part(f"preemption/{number}"), self._world.rank, device)
        self._release = _listen(self)

    def _taken(self) -> int:
        return sum(each.steps for each in self._optimizers)

    def note(self) -> bool:
        """Notes a request; whether it can wait for the end of a step, as a second one does not."""
        now = time.monotonic()
        self._asked = self._asked or now
        return now - self._asked <= _SAME_S

    def between(self) -> None:
        """Between two batches: saves and leaves where a step is over and all ranks stop here.

        Raises:
            SystemExit: with `PREEMPTED`. CheckpointError: what `save` raised; then the exit code is another.
        """
        taken = self._taken()
        if self.over or taken == self._steps or not self._gradients.sync or self._gradients.apart:
            return
        self._steps = taken
        asked = self._asked is not None
        if not (asked if self._agreement is None else self._agreement.reached(asked)):
            return
        self.over = True
        path = self._save()
        if self._world.is_main:
            logger("preemption").warning(
                "asked to end (SIGTERM): saved %s and left with exit code %d; the same command goes on from there.",
                path,
                PREEMPTED,
            )
        sys.exit(PREEMPTED)

    def end(self) -> None:
        """SIGTERM means again what it meant before. May be called again."""
        self.over = True
        self._release()


def _listen(preemption: Preemption) -> Callable[[], None]:
    """Has SIGTERM noted, where Python lets this thread say so; returns what puts the handler back that was there.

    A handler that the script installed is called first. The reference is weak: a run that is gone hears nothing.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        return lambda: None
    heard_by, process = weakref.ref(preemption), os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        listener = heard_by() if os.getpid() == process else None  # a forked child is another process
        heard = listener is not None
        waits = listener is not None and listener.note()
        if callable(before):
            before(number, frame)
        if not waits and (heard or not callable(before)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def release() -> None:
        if signal.getsignal(signal.SIGTERM) is hear:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    signal.signal(signal.SIGTERM, hear)
    return release
