"""`Lifetime`: what is to be done at an end. All ends of a process, in their order:

    run.lifetime                `end_training`, on all ranks: the run's last save, its handlers of signals, profiles, its record
    of_process().work           saves in the background, an evaluation that nobody gathered; the other ranks still answer
    of_process().companions     threads that watch the group, connections between its ranks, words for other ranks in the store
    of_process().group          the group itself (`rendezvous.py`)

The first belongs to a `Run`. The others belong to the process, because its runs share one group: `rendezvous.leave` ends them,
which `end_training` calls, or Python as it ends. Where another library's group outlives a run, only Python does.
Before Python ends anything, `checkpoint/background.py` waits for saves: one that fails has to be the exit code of the process.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar, cast

import torch.distributed as dist

from paceline.world.events import Subscribers

P = ParamSpec("P")


class Lifetime(Subscribers[P]):
    """Ends once. Its subscribers are called then, also where one of them raises."""

    def end(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls them, and those that subscribe meanwhile.

        Raises:
            Exception: what one of them raised, once all were made; that of the last one, with the others as its context.
        """
        if self._subscribers:
            subscriber = self._subscribers.pop(next(iter(self._subscribers)))
            try:
                subscriber(*args, **kwargs)
            finally:
                self.end(*args, **kwargs)


@dataclass(frozen=True)
class Leaving:
    """Why this process leaves its group.

    Attributes:
        failure: the exception that ends the script; None without one.
        at_exit: whether Python ends.
    """

    failure: BaseException | None = None
    at_exit: bool = False

    @property
    def why(self) -> str:
        """The reason, to follow the name of a rank."""
        if self.failure is None:
            return "has ended, or left"
        return f"has ended: {type(self.failure).__name__}: {self.failure}"


class Companion(Protocol):
    """An object that lives as long as this process is in its group, such as a thread that watches the group."""

    def close(self, leaving: Leaving) -> None:
        """Called when this process leaves the group."""
        ...


C = TypeVar("C", bound=Companion)


class ProcessLifetime:
    """What ends as one process leaves its group; the head of the file has the order."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.work: Lifetime[[Leaving]] = Lifetime()
        self.companions: Lifetime[[Leaving]] = Lifetime()
        self.group: Lifetime[[Leaving]] = Lifetime()
        self._kept: dict[type[Companion], Companion] = {}

    def keep(self, companion: Companion) -> None:
        """Keeps an object until this process leaves its group, and closes it then. It replaces an earlier one of its class."""
        self._kept[type(companion)] = companion
        self.companions.subscribe(companion.close)

    def kept(self, kind: type[C]) -> C | None:
        """Returns the object of this class that `keep` has got; None if there is none, as in a forked child."""
        return cast("C | None", self._kept.get(kind))

    def end(self, leaving: Leaving) -> None:
        """Ends all of it."""
        try:
            self.work.end(leaving)
        finally:
            # Companions may keep groups, whose connections would stay open. So no reference to one stays here.
            self._kept.clear()
            try:
                # They may write into the store. If rank 0 is gone, so is the store, and nobody is left to read it.
                with contextlib.suppress(dist.DistNetworkError):
                    self.companions.end(leaving)
            finally:
                self.group.end(leaving)


_of_process = ProcessLifetime()


def of_process() -> ProcessLifetime:
    """Returns that of this process. A forked child has its own, since it has not the threads and connections of its parent."""
    global _of_process
    if _of_process.pid != os.getpid():
        _of_process = ProcessLifetime()
    return _of_process
