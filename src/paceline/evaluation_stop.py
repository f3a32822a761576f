"""Leaving in mid-evaluation: all ranks stop after one batch of it, and the run is saved as it was after its last step.

An evaluation changes no weights, so that the state to save is there already, but for small things that the script may have
moved on since: `StepEnd` remembers those where an epoch ends, and puts them back.

    for epoch ...                            saved and resumed:
        for batch in train_loader: ...       gives nothing, as its epoch was over
        scheduler.step()                     runs again, from what the schedule was before it
        for batch in eval_loader: ...        runs again, from its first batch
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.checkpoint.state import rng
from paceline.data.loader import PreparedLoader
from paceline.run import Run

_LOOK_S = 0.1  # how often a rank that was not asked looks whether another one was
_PATIENCE_S = 0.1  # the first wait for the others; each next one is twice as long
_MOST_PATIENCE_S = 2.0
_ABSENT_S = 3.0  # how long in all to wait for ranks that may not take part in this evaluation
_POLL_S = 0.002


class EvaluationAgreement:
    """Finds the batch of an evaluation after which all ranks stop.

    Nothing makes ranks wait for each other here: one may be many batches ahead of another, and may be waiting in a
    collective operation (`gather_for_metrics`) for one that would wait here for it. So after each batch a rank that knows
    of the request says how far it is, and

        is behind the furthest one     goes on at once
        is the furthest one            waits a moment for the others; then it writes "go" for this batch, and goes on
        sees all at its own batch      writes "stop" for this batch

    Of two words for one batch the first counts for all. The moments grow, so that the ranks come together.

    Args:
        store: shared by the ranks, for this alone.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._evaluation = -1
        self._asked = False
        self._looked = 0.0
        self._patience_s = _PATIENCE_S
        self._waited_for_absent_s = 0.0

    def reached(self, evaluation: int, batch: int, asked: bool) -> bool:
        """Whether to stop here, at the end of a batch.

        Args:
            evaluation: a number that is the same on all ranks, and another one for the next evaluation.
            batch: how many batches of it are over.
            asked: whether this rank was asked to end.

        Ranks: all, at the end of each batch; they need not be at the same one.
        """
        if evaluation != self._evaluation:
            self._evaluation = evaluation
            self._asked = False
            self._patience_s = _PATIENCE_S
            self._waited_for_absent_s = 0.0
        if not self._is_asked(asked):
            return False
        self._store.set(self._key("at", self._rank), str(batch))
        until = time.monotonic() + self._patience_s
        while True:
            batches = [self._batch_of(rank) for rank in range(self._size)]
            if max(batches) > batch:
                return False
            if min(batches) == batch:
                return self._decide(batch, "stop")
            if self._store.check([self._key("word", batch)]):
                return self._decide(batch, "go")
            if time.monotonic() > until or self._waited_for_absent_s > _ABSENT_S:
                self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
                return self._decide(batch, "go")
            if min(batches) == 0:
                self._waited_for_absent_s += _POLL_S
            time.sleep(_POLL_S)

    def _is_asked(self, here: bool) -> bool:
        """Whether any rank was asked; known to the one that was at once, to the others a moment later."""
        if self._asked:
            return True
        if here:
            self._asked = True
            self._store.set(self._key("asked", ""), "1")
        elif time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._asked = bool(self._store.check([self._key("asked", "")]))
        return self._asked

    def _batch_of(self, rank: int) -> int:
        """How far a rank is; 0 where it has not said so."""
        key = self._key("at", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _decide(self, batch: int, word: str) -> bool:
        """Whether all stop after this batch: `word` counts where no other rank has said one before."""
        return bytes(self._store.compare_set(self._key("word", batch), "", word)).decode() == "stop"

    def _key(self, what: str, number: object) -> str:
        return f"{self._evaluation}/{what}/{number}"


class StepEnd:
    """What a script may have changed since its last optimizer step, though an evaluation does not.

    Args:
        run: whose loaders, optimizers and schedulers these are.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prepared = run.prepared
        self._steps = -1
        self._places: list[tuple[PreparedLoader, Any]] = []
        self._schedules: list[Any] = []
        self._groups: list[list[dict[str, Any]]] = []
        self._streams: dict[str, Any] = {}

    def remember(self, steps: int) -> None:
        """Called where the epoch of a loader that trains ends, before the script goes on.

        Args:
            steps: optimizer steps taken so far.
        """
        self._steps = steps
        self._places = [(loader, loader.place()) for loader in self._prepared.loaders]
        self._schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._prepared.schedulers]
        self._groups = [_settings_of(optimizer.param_groups) for optimizer in self._prepared.optimizers]
        self._streams = rng.capture(self._run.device)

    def can_return(self, steps: int) -> bool:
        """Whether `go_back` leads to a state from which the run goes on rightly. The same on all ranks.

        Not where a training loop was left by `break` before the evaluation: whether its epoch is over, the script alone knows.
        """
        training = self._run.active_loaders.training()
        if len(training) == 1:
            return True
        return not training and self._steps == steps

    def go_back(self) -> None:
        """Puts the run back to the end of its last step, as far as it has moved on since."""
        training = self._run.active_loaders.training()
        if training:
            # The evaluation stands inside the body of the training loop. Where it stands before the step, the batch
            # that was given is given again; after the step, what the body has done is kept.
            if self._run.active_loaders.unused:
                training[0].take_back_batch()
            for loader in self._prepared.loaders:
                if loader.under_way and not loader.trains:
                    loader.take_back_epoch()
            return
        for loader, place in self._places:
            loader.put_back(place)
        for scheduler, state in zip(self._prepared.schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, settings in zip(self._prepared.optimizers, self._groups, strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)
        rng.restore(self._streams, self._run.device)


def _settings_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of parameter groups, learning rates among them, without the parameters."""
    settings = []
    for group in groups:
        settings.append({name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
    return settings
