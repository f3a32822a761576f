"""Ends a run during an evaluation: all ranks stop after the same batch, and the run is saved as it was after its last step.

An evaluation changes no weights. But the script may have changed schedulers, loaders and random streams since the last step.
`StepEnd` records these at the end of an epoch, and restores them before the save.

    for epoch ...                            saved and resumed:
        for batch in train_loader: ...       yields nothing, since its epoch was over
        scheduler.step()                     runs again, from the schedule's state before it
        for batch in eval_loader: ...        runs again, from its first batch
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.data.loader import PreparedLoader
from paceline.run.run import Run
from paceline.world import random_streams

_LOOK_S = 0.1  # time between two looks of a rank without a request whether another rank has one
_FIRST_WAIT_S = 0.1  # for the other ranks; each wait is twice as long as the one before
_LONGEST_WAIT_S = 2.0
_ABSENT_S = 3.0  # the sum of all waits for ranks that may not take part in this evaluation
_POLL_S = 0.002


class EvaluationAgreement:
    """Finds the batch of an evaluation after which all ranks stop.

    Ranks must not simply wait for each other here. One may be many batches ahead of another, and may wait in a collective
    operation (`gather_for_metrics`) for a rank that would wait here for it. So after each batch, a rank that knows of the
    request writes the number of its batch into the store. Then there are three cases:

        another rank is ahead          it goes on at once
        no rank is ahead               it waits for the others for a short time, then writes "go" for this batch and goes on
        all ranks are at this batch    it writes "stop" for this batch

    For each batch the first word counts for all ranks. The waits grow, so that the ranks come to the same batch.

    Args:
        store: a store that the ranks share, for this alone.
        rank: the rank of this process.
        size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._evaluation = -1
        self._asked = False
        self._looked_at = 0.0
        self._wait_s = _FIRST_WAIT_S
        self._waited_for_absent_s = 0.0

    def reached(self, evaluation: int, batch: int, asked: bool) -> bool:
        """Returns whether to stop at the end of this batch.

        Args:
            evaluation: the number of the evaluation, the same on all ranks.
            batch: the number of its batches that are over.
            asked: whether this rank has a request to end.

        Ranks: all, at the end of each batch; they need not be at the same batch.
        """
        if evaluation != self._evaluation:
            self._evaluation = evaluation
            self._asked = False
            self._wait_s = _FIRST_WAIT_S
            self._waited_for_absent_s = 0.0
        if not self._is_asked(asked):
            return False
        self._store.set(self._key("at", self._rank), str(batch))
        until = time.monotonic() + self._wait_s
        while True:
            batches = [self._batch_of(rank) for rank in range(self._size)]
            if max(batches) > batch:
                return False
            if min(batches) == batch:
                return self._decide(batch, "stop")
            if self._store.check([self._key("word", batch)]):
                return self._decide(batch, "go")
            if time.monotonic() > until or self._waited_for_absent_s > _ABSENT_S:
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
                return self._decide(batch, "go")
            if min(batches) == 0:
                self._waited_for_absent_s += _POLL_S
            time.sleep(_POLL_S)

    def _is_asked(self, here: bool) -> bool:
        """Returns whether any rank has a request to end. Other ranks learn of it up to `_LOOK_S` later.

        Args:
            here: whether this rank has one.
        """
        if self._asked:
            return True
        if here:
            self._asked = True
            self._store.set(self._key("asked", ""), "1")
        elif time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._asked = bool(self._store.check([self._key("asked", "")]))
        return self._asked

    def _batch_of(self, rank: int) -> int:
        """Returns the number of the last batch that a rank has written; 0 if it has written none."""
        key = self._key("at", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _decide(self, batch: int, word: str) -> bool:
        """Writes the word for a batch, unless another rank has written one. Returns whether all ranks stop after the batch."""
        first_word = bytes(self._store.compare_set(self._key("word", batch), "", word)).decode()
        return first_word == "stop"

    def _key(self, what: str, number: object) -> str:
        return f"{self._evaluation}/{what}/{number}"


class StepEnd:
    """The state after the last optimizer step that a script may change before an evaluation.

    Args:
        run: the run with the loaders, optimizers and schedulers.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prepared = run.prepared
        self._steps = -1  # optimizer steps at the time of `remember`
        self._places: list[tuple[PreparedLoader, Any]] = []
        self._schedules: list[Any] = []
        self._groups: list[list[dict[str, Any]]] = []
        self._streams: dict[str, Any] = {}

    def remember(self, steps: int) -> None:
        """Records the state at the end of a training epoch, before the script goes on.

        Args:
            steps: the number of optimizer steps so far.
        """
        self._steps = steps
        self._places = [(loader, loader.cursor) for loader in self._prepared.loaders]
        self._schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._prepared.schedulers]
        self._groups = [_settings_of(optimizer.param_groups) for optimizer in self._prepared.optimizers]
        self._streams = random_streams.capture(self._run.device)

    def can_return(self, steps: int) -> bool:
        """Returns whether a run can resume from the state after `go_back`. The answer is the same on all ranks.

        It cannot if the script has left its training loop by `break`: then nobody knows whether the epoch is over.
        """
        training = self._run.active_loaders.training()
        if len(training) == 1:
            return True
        return not training and self._steps == steps

    def go_back(self) -> None:
        """Restores the state that the run had at the end of its last step."""
        training = self._run.active_loaders.training()
        if training:
            # The evaluation is inside the body of the training loop. If the step comes after it, a resumed run gets the
            # current training batch again; if the step came before it, that batch is done.
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
        random_streams.restore(self._streams, self._run.device)


def _settings_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the options of parameter groups, such as learning rates, without the parameters."""
    settings = []
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        settings.append(copy.deepcopy(options))
    return settings
