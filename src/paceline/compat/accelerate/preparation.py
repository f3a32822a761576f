"""`prepare` with accelerate's manners: what it does not know passes through, and a schedule runs faster than the run.

accelerate steps a scheduler once for each process (unless batches are split), because its users build schedules for one
process's number of batches. That is kept, and said once with both numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.base.log import warn_once
from paceline.compat.accelerate.arguments import DataLoaderConfiguration
from paceline.compat.accelerate.data_loader import DataLoaderAdapter, prepare_data_loader
from paceline.compat.accelerate.hooks import has_offloaded_params
from paceline.compat.accelerate.samplers import BatchSamplerShard
from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, is_scheduler
from paceline.parallel.materialise import Recipe
from paceline.plan.facts import ModelFacts
from paceline.preparation import Kind, Names, Preparation


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
    """What one `Accelerator` of the compat layer prepares.

    Attributes:
        tail: of loaders prepared from now on, where a script has changed its mind.
        elsewhere: models that another accelerator prepared, such as that of a DeepSpeed engine.
    """

    refuses_unprepared = False  # accelerate lets a script step what it did not prepare
    tail: str | None = None
    _scheduler_times = 1
    _loading = DataLoaderConfiguration()
    _rng_types: Sequence[Any] = ("generator",)
    _steps_with_optimizer = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.elsewhere: list[nn.Module] = []

    def step_schedulers(self, times: int, with_optimizer: bool) -> None:
        """Schedulers prepared from now on step so often for each step of an optimizer, or whenever they are called."""
        self._scheduler_times = times
        self._steps_with_optimizer = with_optimizer

    def kind_of(self, value: object) -> Kind:
        """What it does not know passes through."""
        if any(value is model for model in self.elsewhere):
            return "done"
        known = isinstance(value, nn.Module | Optimizer | DataLoader | PreparedLoader) or is_scheduler(value)
        return super().kind_of(value) if known else "done"

    def load_as(self, config: DataLoaderConfiguration, rng_types: Sequence[Any] | None) -> None:
        """Loaders prepared from now on follow these choices, beside those of the settings."""
        self._loading = config
        self._rng_types = ["generator"] if rng_types is None else list(rng_types)

    def loader(self, loader: Any, *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """A loader in accelerate's order; an iterable dataset is read by rank 0 for all, unless the script says otherwise."""
        known = self.known_loader(loader)
        if known is not None:
            return known
        self.check_width()
        run, settings = self.run, self.run.settings
        prepared = prepare_data_loader(
            loader,
            run.device,
            run.plan.layout.width,
            run.plan.layout.data_index(run.world.rank),
            split_batches=settings.split_batches,
            put_on_device=place,
            rng_types=list(self._rng_types),
            dispatch_batches=settings.dispatch_batches,
            even_batches=settings.even_batches if self.tail is None else self.tail == "pad",
            use_seedable_sampler=self._loading.use_seedable_sampler,
            data_seed=settings.data_seed,
            non_blocking=settings.non_blocking,
            use_stateful_dataloader=self._loading.use_stateful_dataloader,
            collectives=run.data_ranks,
            active=run.active_loaders,
            **chosen,
        )
        prepared.source = loader
        prepared._is_accelerate_prepared = True
        return self.record_loader(loader, prepared)

    def known_loader(self, loader: object) -> PreparedLoader | None:
        """The prepared loader, where this is one or was prepared before."""
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader  # type: ignore[return-value]
        for known in self.run.prepared.loaders:
            if getattr(known, "source", None) is loader:
                return known
        return None

    def recipe_of(self, module: nn.Module, facts: ModelFacts) -> Recipe | None:
        """Weights that hooks bring for each forward are on meta between them, and have values."""
        if any(map(has_offloaded_params, module.modules())):
            return None
        return super().recipe_of(module, facts)

    @contextmanager
    def tails(self, tail: Any) -> Iterator[None]:
        """Epochs begun inside fill up their last global batch ("pad"), or let it be short ("divide"; None: as ever).

        Every process takes part in every step, also one that has no batch left: with a row that counts nothing.
        """
        loaders = [loader for loader in self.run.prepared.loaders if isinstance(loader, DataLoaderAdapter)]
        samplers = [loader.batch_sampler for loader in loaders if isinstance(loader.batch_sampler, BatchSamplerShard)]
        evenness = [sampler.even_batches for sampler in samplers]
        taking_part = [loader.takes_part for loader in loaders]
        for sampler in samplers:
            sampler.even_batches = sampler.even_batches if tail is None else tail == "pad"
        for loader in loaders:
            loader.takes_part = True
        try:
            yield
        finally:
            for sampler, even in zip(samplers, evenness, strict=True):
                sampler.even_batches = even
            for loader, takes_part in zip(loaders, taking_part, strict=True):
                loader.takes_part = takes_part

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
            self.run.gradients,
            self._scheduler_times,
            self._steps_with_optimizer,
        )
        prepared.speaks = self.run.world.is_main
        self.run.prepared.schedulers.append(prepared)
        return prepared
