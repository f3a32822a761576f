"""Preemption: after SIGTERM or Ctrl-C all ranks stop after the same step, save, and leave with an exit code of its own.

    a signal    is recorded and not raised, so that the current step is completed
    step ends   the rank that got the signal writes to the store after which step all ranks stop: a few steps later
    every rank  reads the store at the end of a step, and stops after the step that is written there
    stop        save_state -> one log line -> sys.exit(PREEMPTED), through every `finally`

No collective is needed, because gradients are averaged in every step. A rank that has finished step n knows that all other
ranks have finished step n - 2 at least (n - 1 if collectives block the host). So every rank reads a stop that was written two
steps ahead in time.

In an evaluation no step ends. There the ranks agree on one of its batches, see `evaluation_stop`.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from types import FrameType

import torch
from torch.distributed.distributed_c10d import Store

from paceline.base import env
from paceline.base.errors import TrainError
from paceline.base.exits import INTERRUPTED, PREEMPTED
from paceline.base.log import logger
from paceline.run.evaluation_stop import EvaluationAgreement, StepEnd
from paceline.run.run import Run
from paceline.world import rendezvous

LEAD = 2  # steps that one rank may be ahead of another
PACED = 32  # the step after which rank 0 says how often to look
# Ranks look into the store about every tenth of a second, but at every 32nd step at least.
_LOOK_S = 0.1
_MOST_STEPS_IN_A_LOOK = 32
_SAME_S = 1.0  # a launcher and a batch system may both pass on one request
_numbers = count()
Handler = Callable[[int, FrameType | None], object] | int | None  # what `signal.getsignal` gives
# Runs that save and leave. They are kept until the process has ended: a launcher's SIGTERM after Ctrl-C, which comes when
# leaving takes some seconds, still finds who has noted the request.
_leaving: list[Preemption] = []


class EndAgreement:
    """Finds the step after which all ranks stop.

    Args:
        store: a store of all ranks, which nothing else uses.
        rank: of this process.
        device: the device that computes. The host is kept from running more than a step ahead of it, since `LEAD` relies on it.
    """

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._step = 0
        self._every = 1  # steps between two looks into the store
        self._has_asked = False
        self._half = 0.0  # when half of the steps before `PACED` were over
        self._event: torch.Event | None = None

    def reached(self, asked: bool) -> bool:
        """Returns whether to stop here, at the end of a step.

        Args:
            asked: whether this rank was asked to stop.

        Ranks: all, at the end of each step. It reads the store once, at every step or less often.

        Raises:
            TrainError: `preemption-apart`.
        """
        self._wait_for_device()
        self._step += 1
        self._pace()
        step = self._step
        # Between these two steps not all ranks know the new pace yet, so no step can be chosen at which all of them look.
        pace_is_known = not PACED <= step < PACED + LEAD
        if asked and not self._has_asked and pace_is_known:
            # The next step at which all ranks look, at least `LEAD` steps ahead. `compare_set` keeps the first proposal, so
            # that ranks which were asked at the same time cannot choose different steps.
            stop = -(-(step + LEAD) // self._every) * self._every
            self._store.compare_set("stop", "", str(stop))
            self._has_asked = True
        if step % self._every:
            return False
        last_step = bytes(self._store.compare_set("stop", "?", "?")).decode()  # as it stands, in one round trip
        if last_step == "?" or step < int(last_step):
            return False
        if step > int(last_step):
            raise TrainError(
                "preemption-apart",
                "the ranks cannot stop after the same step.",
                why=f"after SIGTERM they were to stop after step {last_step} since `resume()`; rank {self._rank} was at "
                f"{step} already: in this loop ranks take steps without waiting for each other",
                fix="average the parameters of all ranks with `LocalSGD`; or save a checkpoint in the script",
            )
        return True

    def _pace(self) -> None:
        """Measures the length of a step on rank 0, and makes all ranks look into the store at the same steps."""
        if self._step == PACED // 2:
            self._half = time.monotonic()
        if self._step == PACED and self._rank == 0:
            seconds = (time.monotonic() - self._half) / (PACED - PACED // 2)
            steps_in_a_look = int(_LOOK_S / max(seconds, 1e-6))
            self._store.set("every", str(max(1, min(_MOST_STEPS_IN_A_LOOK, steps_in_a_look))))
        # No rank is more than `LEAD` steps ahead, so that rank 0 has written the pace by now.
        if self._step == PACED + LEAD:
            self._every = int(self._store.get("every"))

    def _wait_for_device(self) -> None:
        """Waits until the device has finished the step before this one."""
        if self._device.type == "cpu":
            return
        if self._event is not None:
            self._event.synchronize()
        self._event = torch.Event(device=self._device)
        self._event.record()


class Preemption:
    """Saves and leaves after SIGTERM or Ctrl-C.

    Args:
        run: an optimizer of it that has stepped marks the end of a step.
        save: saves under an automatic name, and returns the folder.

    Attributes:
        over: whether requests have no effect any more: it saves, has saved, or `end` was called.
        ended: whether `end` was called.

    Ranks: all make one, and iterate over prepared loaders.
    """

    def __init__(self, run: Run, save: Callable[[], str | None]) -> None:
        self._run = run
        self._world = run.world
        self._save = save
        self._step_end = StepEnd(run)
        self._steps = self._taken()
        self._requests: dict[int, float] = {}  # signal -> when it first came
        self._evaluated = (-1, 0)  # steps taken before the evaluation at hand, and batches of it
        self.over = False
        self.ended = False
        number = next(_numbers)
        self._agreement: EndAgreement | None = None
        self._evaluation_agreement: EvaluationAgreement | None = None
        if self._world.size > 1:
            store = rendezvous.part(f"preemption/{number}")
            self._agreement = EndAgreement(store, self._world.rank, run.device)
            self._evaluation_agreement = EvaluationAgreement(
                rendezvous.part(f"preemption/{number}/evaluation"), self._world.rank, self._world.size
            )
        self._unsubscribe = [
            run.events.between_batches.subscribe(self.between),
            run.events.between_evaluation_batches.subscribe(self.in_evaluation),
            run.events.epoch_over.subscribe(self.epoch_over),
        ]
        self._release = _listen(self)

    def _taken(self) -> int:
        return sum(optimizer.steps for optimizer in self._run.prepared.optimizers)

    def _is_between_steps(self) -> bool:
        """Returns whether no accumulation window is open, and the ranks hold the same parameters."""
        return self._run.gradients.is_between_windows and self._run.gradients.replicas_equal

    def note(self, number: int) -> bool:
        """Records a request to end. Returns whether it waits for the end of a step: a second one of the same signal does not.

        SIGINT and then SIGTERM are one request, since a launcher that was interrupted sends both.
        """
        now = time.monotonic()
        if number == signal.SIGINT and not self._requests and self._world.is_main:
            _tell("interrupted: the run saves after this step and ends; Ctrl-C again ends it at once, without a save")
        first = self._requests.setdefault(number, now)
        return now - first <= _SAME_S

    def between(self) -> None:
        """Called between two batches: saves and leaves if a step is over and all ranks stop here.

        Raises:
            SystemExit: with `PREEMPTED` or `INTERRUPTED`. CheckpointError: what `save` raised; then the exit code is another.
        """
        taken = self._taken()
        if self.over or taken == self._steps or not self._is_between_steps():
            return
        self._steps = taken
        asked = bool(self._requests)
        stops = asked
        if self._agreement is not None:
            stops = self._agreement.reached(asked)
        if stops:
            self._leave()

    def in_evaluation(self) -> None:
        """Called between two batches of an evaluation: does the same, but saves the run as it was after its last step.

        Raises:
            As `between`.
        """
        taken = self._taken()
        if self.over or not taken or not self._is_between_steps():
            return
        # Batches are counted anew in each evaluation. A new one has begun if steps were taken since the last call.
        steps_before, batches = self._evaluated
        if steps_before != taken:
            batches = 0
        self._evaluated = (taken, batches + 1)
        # Where several optimizers take turns, gradients of the last pass belong to the one that stepped last.
        has_unstepped_gradients = all(optimizer.pending for optimizer in self._run.prepared.optimizers)
        if has_unstepped_gradients or not self._step_end.can_return(taken):
            return
        asked = bool(self._requests)
        stops = asked
        if self._evaluation_agreement is not None:
            stops = self._evaluation_agreement.reached(*self._evaluated, asked)
        if stops:
            self._step_end.go_back()
            # The script may be in inference mode, in which no tensor can be written that training goes on with.
            with torch.inference_mode(False), torch.no_grad():
                self._leave()

    def epoch_over(self) -> None:
        """Called after the last batch of a training epoch: an evaluation may follow."""
        if not self.over:
            self._step_end.remember(self._taken())

    def _leave(self) -> None:
        self.over = True
        _leaving.append(self)
        path = self._save()
        number = next(iter(self._requests), signal.SIGTERM)
        code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        if self._world.is_main:
            logger("preemption").warning(
                "asked to end (%s): saved %s and exited with exit code %d; the same command resumes from there.",
                signal.Signals(number).name,
                path,
                code,
            )
        # A launcher of ours tells by `PREEMPTED` that the run was saved, and itself ends with what its signal means.
        sys.exit(PREEMPTED if env.get("PACELINE_RUN") else code)

    def end(self) -> None:
        """Restores the handlers of the signals. It may be called several times."""
        self.over = True
        self.ended = True
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._release()


def _listen(preemption: Preemption) -> Callable[[], None]:
    """Installs handlers that note the signals, if this thread may; returns a function that restores the earlier ones."""
    # Python allows handlers to be set in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    numbers = [signal.SIGTERM] if _interactive() else [signal.SIGTERM, signal.SIGINT]
    releases = [_listen_for(number, preemption) for number in numbers]

    def release() -> None:
        for put_back in releases:
            put_back()

    return release


def _interactive() -> bool:
    """Returns whether this is a prompt or a notebook, where Ctrl-C ends a line or a cell and not the process."""
    prompt = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
    return prompt and not env.get("PACELINE_RUN")


class _SignalListener:
    """The handler of one signal.

    A handler that the script installed is called first. The reference is weak: a run that is gone hears nothing.

    Args:
        preemption: who notes the signal.
        before: the handler that was there.
    """

    def __init__(self, preemption: Preemption, before: Handler) -> None:
        self._listener = weakref.ref(preemption)
        self._process = os.getpid()
        self.before = before

    @property
    def listener(self) -> Preemption | None:
        """Who notes the signal; None where the run is over, or in a forked child, which is another process."""
        if os.getpid() != self._process:
            return None
        listener = self._listener()
        return None if listener is None or listener.ended else listener

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listener = self.listener
        before = self.before
        # Of an earlier run in this process, which is over, the handler may still stand beneath this one.
        while isinstance(before, _SignalListener) and (before.listener is None or before.listener.over):
            before = before.before
        waits = listener is not None and listener.note(number)
        # Python's own handler would raise KeyboardInterrupt in the middle of a step.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
            if listener is None:
                return
        if waits:
            return
        if number == signal.SIGINT:
            if listener is not None:
                _tell("interrupted again: the run ends at once, without a save")
            signal.signal(number, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        # The process must end by the signal itself, since its parent reads from that how it ended.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _listen_for(number: signal.Signals, preemption: Preemption) -> Callable[[], None]:
    """Installs the handler of one signal, and returns a function that restores the earlier one."""
    before = signal.getsignal(number)
    # Whoever started the process ignores this signal on purpose, as a shell ignores Ctrl-C for its background jobs.
    if before is signal.SIG_IGN:
        return lambda: None
    handler = _SignalListener(preemption, before)
    signal.signal(number, handler)

    def release() -> None:
        # If another handler was installed since then, it stays.
        if signal.getsignal(number) is handler:
            signal.signal(number, before or signal.SIG_DFL)

    return release


def _tell(line: str) -> None:
    """Writes a line from within a handler, where a stream that is being written to cannot be used."""
    os.write(2, f"paceline: {line}\n".encode())
