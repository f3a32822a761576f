"""Says once that an evaluation ended without anything being gathered: each process then knows the metric of its own part.

    an evaluation loop ends                                       was anything gathered or reduced since it began?
    a training step, the same loop again, or the run's end        still nothing: the rank adds itself to a count in the store
    the count is the number of ranks                              the rank that was last warns

No rank waits for another. If rank 0 alone evaluates, the count stays at 1.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.base.log import logger
from paceline.torch_internals.groups import collectives_so_far
from paceline.world import lifetime, rendezvous
from paceline.world.events import Events
from paceline.world.lifetime import Leaving
from paceline.world.places import user_frame
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.data.loader import PreparedLoader

_NUMBERS = count()


@dataclass(frozen=True)
class _Loop:
    """A loop over a prepared loader.

    Attributes:
        loader: what it iterates; weakly, so that a loader which the script drops ends its workers at once.
        place: file and line of the script.
        gathered: how often anything had been gathered when the loop began.
    """

    loader: weakref.ref[PreparedLoader]
    place: str
    gathered: tuple[int, int]


class UnreducedMetrics:
    """Looks for an evaluation after which nothing is gathered or reduced.

    Args:
        world: the ranks of the run.
        events: of the run.
        evaluates: returns whether all prepared models are in evaluation mode.
    """

    def __init__(self, world: World, events: Events, evaluates: Callable[[], bool]) -> None:
        self._world = world
        self._evaluates = evaluates
        self._number = next(_NUMBERS)
        self._calls = 0  # of the accelerator's `gather`, `reduce` and the like
        self._running: list[_Loop] = []
        self._ended: _Loop | None = None  # an evaluation after which nothing was gathered yet
        self._subscriptions: list[Callable[[], None]] = []
        if world.size > 1:
            self._subscriptions = [
                events.loop_began.subscribe(self._begin),
                events.loop_over.subscribe(self._end),
                events.gathered.subscribe(self._count),
                events.backward.subscribe(lambda *_: self._decide()),
            ]
            itself = weakref.ref(self)
            lifetime.of_process().work.subscribe(lambda leaving: _at_the_end(itself(), leaving))

    def stop(self) -> None:
        """Looks no longer."""
        for unsubscribe in self._subscriptions:
            unsubscribe()
        self._ended = None

    def _count(self, how: str, result: object) -> None:
        self._calls += 1

    def _gathered(self) -> tuple[int, int]:
        # A script may also call `torch.distributed` itself, as the metrics of other libraries do.
        return self._calls, collectives_so_far()

    def _begin(self, loader: PreparedLoader) -> None:
        if self._ended is not None and self._ended.loader() is loader:
            self._decide()
        if loader.plan.width > 1:
            self._running.append(_Loop(weakref.ref(loader), _place(), self._gathered()))

    def _end(self, loader: PreparedLoader, finished: bool) -> None:
        for loop in reversed(self._running):
            if loop.loader() is loader:
                self._running.remove(loop)
                break
        else:
            return
        if not finished or loader.trains or (torch.is_grad_enabled() and not self._evaluates()):
            return
        if self._ended is not None and self._ended.gathered != self._gathered():
            self._ended = None
        rows = loader.epoch_rows
        if self._ended is None and loop.gathered == self._gathered() and rows is not None and rows.loaded:
            self._ended = loop

    def _decide(self) -> None:
        loop = self._ended
        if loop is None:
            return
        self._ended = None
        if loop.gathered != self._gathered():
            return
        self.stop()
        arrived = rendezvous.part(f"unreduced/{self._number}").add(loop.place, 1)
        if arrived == self._world.size:
            logger("data").warning(
                "%s evaluates on a prepared loader, and nothing was gathered or reduced since: each of the %d processes "
                "has the metric of its own part of the samples. Gather in the loop, `accelerator.gather_for_metrics((outputs, "
                "targets))`, or sum after it: `accelerator.reduce(torch.tensor([right, samples], device=accelerator.device))`.",
                loop.place, self._world.size,
            )  # fmt: skip

    def end(self, leaving: Leaving) -> None:
        """This process leaves. A script that failed may not have come to the line that gathers."""
        if leaving.failure is None:
            # The store is on rank 0, which may have ended.
            with contextlib.suppress(dist.DistNetworkError):
                self._decide()


def _at_the_end(metrics: UnreducedMetrics | None, leaving: Leaving) -> None:
    if metrics is not None:
        metrics.end(leaving)


def _place() -> str:
    """Returns the line of the loop: of the script, and not of a progress bar around the loader."""
    innermost = frame = user_frame()
    while frame is not None and "site-packages" in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or innermost
    return "a loop" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
