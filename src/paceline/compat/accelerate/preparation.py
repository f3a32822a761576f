"""`prepare` with accelerate's manners: what it does not know passes through, and a schedule runs faster than the run.

accelerate steps a scheduler once for each process (unless batches are split), because its users build schedules for one
process's number of batches. That is kept, and said once with both numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from paceline.base.log import warn_once
from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, is_scheduler
from paceline.preparation import Preparation


class AcceleratedScheduler(PreparedScheduler):
    """Steps as often for one optimizer step as there are processes.

    Args:
        scheduler, optimizers, accumulation: as for `PreparedScheduler`.
        times: steps of the scheduler for one of the optimizer.
        with_optimizer: False steps at each call, whatever optimizers do.

    Attributes:
        speaks: whether this process says that there are several steps.
    """

    speaks = True

    def __init__(
        self, scheduler: Any, optimizers: Any, accumulation: Any, times: int = 1, with_optimizer: bool = True
    ) -> None:
        super().__init__(scheduler, optimizers, accumulation)
        self._times, self._with_optimizer = times, with_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One scheduler step for each process, where an optimizer step was taken."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._accumulation.sync or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        if self._times > 1 and self.speaks:
            warn_once(
                "compat",
                f"{type(self.scheduler).__name__} takes {self._times} steps for 1 optimizer step, as under accelerate, "
                f"because there are {self._times} processes. Native: `paceline.Accelerator` takes 1.",
            )
        for _ in range(self._times):
            # A last, smaller batch may ask for a step too many of a schedule with an end.
            total = getattr(self.scheduler, "total_steps", None)
            if self._times == 1 or total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)


class AcceleratePreparation(Preparation):
    """What one `Accelerator` of the compat layer prepared."""

    scheduler_times = 1
    step_scheduler_with_optimizer = True
    tail: str | None = None  # of loaders prepared from now on, where a script has changed its mind

    def _kind(self, value: Any) -> str:
        known = isinstance(value, nn.Module | Optimizer | DataLoader | PreparedLoader) or is_scheduler(value)
        return super()._kind(value) if known else "done"

    def loader(self, loader: Any, *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Iterable datasets are read by rank 0 for all, unless the script says otherwise."""
        if self._loader_options.get("dispatch") is None and isinstance(
            getattr(loader, "dataset", None), IterableDataset
        ):
            chosen["dispatch"] = place
        if self.plan.layout.width == 1:
            chosen["tail"] = "divide"  # one process has nobody to keep up with
        elif self.tail is not None:
            chosen["tail"] = self.tail
        return super().loader(loader, place=place, **chosen)

    @contextmanager
    def tails(self, tail: Any) -> Iterator[None]:
        """Epochs begun inside treat their last global batch so (None: as ever)."""
        feeds = [loader._feed for loader in self.loaders if tail is not None and loader.plan.tail != "drop"]
        before = [feed.plan for feed in feeds]
        for feed in feeds:
            feed.plan = replace(feed.plan, tail=tail)
        try:
            yield
        finally:
            for feed, plan in zip(feeds, before, strict=True):
                feed.plan = plan

    def _optimizer(self, optimizer: Optimizer, before: Any) -> PreparedOptimizer:
        """Takes optimizers of any parameters, in any order: replicas keep the parameters that a script made."""
        known = next((each for each in self.optimizers if each.optimizer is optimizer), None)
        if known is not None:
            return known
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if own <= before.keys() and any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            return super()._optimizer(optimizer, before)
        prepared = PreparedOptimizer(optimizer, self._accumulation, self._scaler, self._stepping)
        self.optimizers.append(prepared)
        self._known.add(optimizer)
        return prepared

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A scheduler that steps once for each process."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        optimizers = [each for each in self.optimizers if own is each or own is each.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            optimizers or self.optimizers,
            self._accumulation,
            self.scheduler_times,
            self.step_scheduler_with_optimizer,
        )
        prepared.speaks = self._collectives.world.is_main
        self.schedulers.append(prepared)
        return prepared

    def _refuse_unprepared(self, optimizer: torch.optim.Optimizer) -> None:
        self._known.add(optimizer)  # accelerate lets a script step what it did not prepare
