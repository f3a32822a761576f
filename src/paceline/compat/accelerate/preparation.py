"""`prepare` with accelerate's manners: what it does not know passes through, and what was prepared before stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from paceline.compat.accelerate.gradient_state import GradientState
from paceline.compat.accelerate.optimizer import AcceleratedOptimizer
from paceline.compat.accelerate.scheduler import AcceleratedScheduler
from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, is_scheduler
from paceline.preparation import Kind, Names, Preparation


class AcceleratePreparation(Preparation):
    """What one `Accelerator` of the compat layer prepares.

    Attributes:
        tail: of loaders prepared from now on, where a script has changed its mind.
    """

    refuses_unprepared = False  # accelerate lets a script step what it did not prepare
    tail: str | None = None
    gradient_state: GradientState | None = None
    _splits_batches = False
    _steps_with_optimizer = True

    def step_schedulers(self, splits_batches: bool, with_optimizer: bool) -> None:
        """How schedulers prepared from now on step; see `AcceleratedScheduler`."""
        self._splits_batches = splits_batches
        self._steps_with_optimizer = with_optimizer

    def kind_of(self, value: object) -> Kind:
        """What it does not know passes through, and so does what was prepared before."""
        if getattr(value, "_is_accelerate_prepared", False) is True:
            return "done"
        known = isinstance(value, nn.Module | Optimizer | DataLoader | PreparedLoader) or is_scheduler(value)
        return super().kind_of(value) if known else "done"

    def loader(self, loader: Any, *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Iterable datasets are read by rank 0 for all, unless the script says otherwise."""
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        if self.run.settings.dispatch_batches is None and is_stream:
            chosen["dispatch"] = place
        if self.run.plan.layout.width == 1:
            chosen["tail"] = "divide"  # one process has nobody to keep up with
        elif self.tail is not None:
            chosen["tail"] = self.tail
        prepared = super().loader(loader, place=place, **chosen)
        prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
        prepared.gradient_state = self.gradient_state  # type: ignore[attr-defined]
        return prepared

    def prepare(self, objects: Sequence[Any], *args: Any, **named: Any) -> list[Any]:
        """Prepares objects; the models among them are marked as prepared."""
        results = super().prepare(objects, *args, **named)
        for result in results:
            if isinstance(result, nn.Module):
                result._is_accelerate_prepared = True  # type: ignore[assignment]
        return results

    @contextmanager
    def tails(self, tail: Any) -> Iterator[None]:
        """Epochs begun inside treat their last global batch so (None: as ever)."""
        loaders = self.run.prepared.loaders
        feeds = [loader._feed for loader in loaders if tail is not None and loader.plan.tail != "drop"]
        before = [feed.plan for feed in feeds]
        for feed in feeds:
            feed.plan = replace(feed.plan, tail=tail)
        try:
            yield
        finally:
            for feed, plan in zip(feeds, before, strict=True):
                feed.plan = plan

    def optimizer(self, optimizer: Optimizer, names: Names) -> PreparedOptimizer:
        """Takes optimizers of any parameters, in any order: replicas keep the parameters that a script made."""
        known = self.run.prepared.optimizer_of(optimizer)
        if known is not None:
            return known
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        are_prepared = {id(parameter) for parameter in parameters} <= names.keys()
        if are_prepared and any(parameter.requires_grad for parameter in parameters):
            return super().optimizer(optimizer, names)
        return self.record_optimizer(optimizer)

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A scheduler that steps once for each process."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        prepared = AcceleratedScheduler(
            scheduler,
            self.run.prepared.optimizers_scheduled_by(scheduler),
            self._steps_with_optimizer,
            self._splits_batches,
            self.gradient_state,
        )
        self.run.prepared.schedulers.append(prepared)
        return prepared

    def record_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Takes in an optimizer, whose gradients may come from a plain `loss.backward()`."""
        run = self.run
        average = self._average if run.world.size > 1 else None
        entry = AcceleratedOptimizer.of_run(optimizer, run.gradients, run.scaler, run.optimizer_step, average)
        run.prepared.optimizers.append(entry)
        run.prepared.may_step(optimizer)
        return entry

    def _average(self) -> None:
        """Averages gradients that are not averaged yet. Ranks: all."""
        for entry in self.run.prepared.models:
            entry.chain.finish_reduction()
