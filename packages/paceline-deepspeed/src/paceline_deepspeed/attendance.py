"""`Attendance`: who has come to a call that all ranks must make, known before anything could hang on it.

a training forward pass     each rank writes into the store which micro-batch it begins: a few microseconds, no answer
a save                      each rank signs in; whoever waits sees who is missing, and what became of them:
                                ended, or at a later micro-batch: they will not come, an error within seconds
                                silent: a warning after `PATIENCE_S`, an error after the group's timeout
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from paceline.base.errors import CheckpointError
from paceline.base.log import logger
from paceline.world import lifetime, rendezvous
from paceline.world.world import World

PATIENCE_S = 10.0
_POLL_S = 0.02
_engines = count()  # numbers them alike on all ranks
_GRACE_S = 1.0  # what a rank has written may still be under way


class Attendance:
    """Whether all ranks call the collective methods of one engine. Ranks: all make their engines in the same order."""

    def __init__(self, world: World, others_answer: bool) -> None:
        self._world = world
        self._calls = 0
        self._begun = 0  # micro-batches, which a load does not turn back
        self._micro = -1  # number of the last one
        self._timeout_s = rendezvous.timeout(None)
        self._store: Any = None
        number = next(_engines)
        if world.size > 1 and others_answer:
            self._store = rendezvous.part(f"attendance/{number}")
            ends = lifetime.of_process().companions
            ends.subscribe(lambda leaving: self._store.set(f"ended/{world.rank}", leaving.why))

    def begins(self, micro_batch: int) -> None:
        """This rank begins a micro-batch that trains; one that began already, with several forward passes, counts once."""
        if self._store is not None and micro_batch != self._micro:
            self._begun += 1
            self._micro = micro_batch
            self._store.set(f"at/{self._world.rank}", str(self._begun))

    def call(self, name: str, fix: str) -> None:
        """Returns once all ranks are here. Ranks: all.

        Args:
            name: what is called.
            fix: what the script should do, where ranks do not come.

        Raises:
            CheckpointError: `checkpoint-ranks-missing`.
        """
        if self._store is None:
            return
        self._calls += 1
        keys = {rank: f"{self._calls}/{rank}" for rank in range(self._world.size)}
        self._store.set(keys[self._world.rank], name)
        started = time.monotonic()
        has_warned = False
        while not self._store.check(list(keys.values())):
            time.sleep(_POLL_S)
            waited = time.monotonic() - started
            missing: list[int] = []
            gone: dict[int, str] = {}  # rank -> why it will not come
            for rank, key in keys.items():
                if self._store.check([key]):
                    continue
                missing.append(rank)
                reason = self._gone(rank)
                if reason:
                    gone[rank] = reason
            is_late = waited > self._timeout_s
            if missing and (is_late or (gone and waited > _GRACE_S)):
                reasons = gone or dict.fromkeys(missing, f"did not come within {self._timeout_s:g} s")
                raise CheckpointError(
                    "checkpoint-ranks-missing",
                    f"rank {self._world.rank} called {name}, but rank {', '.join(map(str, reasons))} did not.",
                    why=[f"rank {rank} {reason}" for rank, reason in reasons.items()],
                    fix=fix,
                )
            if missing and not has_warned and waited > PATIENCE_S:
                has_warned = True
                logger("compat").warning(
                    "rank %d waits in %s for rank %s since %.0f s: every rank must call it. %s",
                    self._world.rank,
                    name,
                    ", ".join(map(str, missing)),
                    waited,
                    fix,
                )
        if self._calls > 2:  # whoever is here has read what was written two calls ago
            self._store.delete_key(f"{self._calls - 2}/{self._world.rank}")

    def _gone(self, rank: int) -> str:
        """Returns why a rank will not come, or "" where it may."""
        if self._store.check([f"ended/{rank}"]):
            return str(bytes(self._store.get(f"ended/{rank}")).decode())
        if self._store.check([f"at/{rank}"]):
            begun = int(self._store.get(f"at/{rank}"))
            if begun > self._begun:
                return f"went on to micro-batch {begun}; this rank has done {self._begun}"
        return ""
