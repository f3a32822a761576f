"""`prepare` as accelerate does it: objects of unknown types and objects that are prepared already come back unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, is_scheduler
from paceline.parallel.data.replicate_applied import AveragedGradients
from paceline.parallel.materialise import Recipe
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.run.preparation import Kind, Names, Preparation
from paceline.run.prepared import EntryOfModel, PreparedModel
from paceline.run.run import Run
from paceline.world.mesh import Mesh
from paceline.world.param_groups import parameters_of
from paceline_accelerate.accelerator_arguments import problem_of_wanted_device
from paceline_accelerate.arguments import DataLoaderConfiguration
from paceline_accelerate.data_loader import prepare_data_loader
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.hooks import has_offloaded_params
from paceline_accelerate.loader_classes import DataLoaderAdapter
from paceline_accelerate.optimizer import AcceleratedOptimizer
from paceline_accelerate.replicas import as_accelerate_wraps
from paceline_accelerate.samplers import BatchSamplerShard
from paceline_accelerate.scheduler import AcceleratedScheduler
from paceline_accelerate.wrapping import get_model_tp_size


class AcceleratePreparation(Preparation):
    """Prepares the objects of one `Accelerator` of the compat layer.

    Args:
        gradient_state: the accumulation windows, as schedulers see them.
        loading: options of loaders.
        rng_types: generators whose states ranks make the same before each epoch.

    Attributes:
        tail: what loaders prepared from now on do with a short last batch; a script may change it by `even_batches`.
        elsewhere: models that another accelerator prepared, such as that of a DeepSpeed engine.
        stepped_elsewhere: optimizers that such engines step.
        device_problem: the error for a device that a variable names and this process cannot use; None if there is none.
    """

    tail: Literal["divide", "pad"]

    def __init__(
        self,
        run: Run,
        gradient_state: GradientState,
        loading: DataLoaderConfiguration,
        rng_types: Sequence[Any],
    ) -> None:
        super().__init__(run)
        self.tail = run.plan.semantics.tail
        self.device_problem = problem_of_wanted_device()
        self._gradient_state = gradient_state
        self._loading = loading
        self._rng_types = rng_types
        self.elsewhere: list[nn.Module] = []
        self.stepped_elsewhere: list[AcceleratedOptimizer] = []
        # Models for evaluation alone, each with the number of models that were prepared for training before it.
        self._evaluated: list[tuple[int, nn.Module]] = []
        self._forgotten: list[weakref.ref[PreparedModel]] = []

    def kind_of(self, value: object) -> Kind:
        """Returns the kind of an object; it is "done" for unknown types and for what was prepared before."""
        is_elsewhere = any(value is model for model in self.elsewhere)
        if is_elsewhere or self._was_prepared(value) or isinstance(value, PreparedOptimizer | PreparedScheduler):
            return "done"
        is_ours = isinstance(value, nn.Module | Optimizer | DataLoader | PreparedLoader) or is_scheduler(value)
        if not is_ours:  # also what the native `prepare` takes for a loader
            return "done"
        return super().kind_of(value)

    def _was_prepared(self, value: object) -> bool:
        """Returns whether an object needs no preparation, because this accelerator or an earlier one has prepared it."""
        is_marked = getattr(value, "_is_accelerate_prepared", False) is True
        if not is_marked or not isinstance(value, nn.Module):
            return is_marked
        # Preparing a module without strategies once more changes nothing in it, and it needs an entry in this run.
        return self.run.prepared.find(value, wrapped_only=True) is not None or hasattr(value, "_paceline_entry")

    def record_again(self, objects: Sequence[object]) -> None:
        """Records what was prepared before `free_memory`, or by an earlier accelerator, and is passed to `prepare` again.

        Without it, such an object would work, but `save_state` would leave it out.
        """
        prepared = self.run.prepared
        for value in objects:
            if _steps_by_windows(value) and not _is_among(value, prepared.optimizers):
                self._record_optimizer(value)
            elif isinstance(value, PreparedScheduler) and not _is_among(value, prepared.schedulers):
                prepared.schedulers.append(value)
            elif isinstance(value, DataLoaderAdapter) and not _is_among(value, prepared.loaders):
                if value._is_accelerate_prepared:  # one that the script has made itself is still to be prepared
                    value.join(self.run.active_loaders)
                    prepared.loaders.append(value)
            elif isinstance(value, nn.Module) and prepared.find(value) is None:
                entry = EntryOfModel.of(value)
                if entry is not None:
                    prepared.models.append(entry)

    def _record_stepped_models(self, optimizer: Optimizer) -> None:
        """Records the models of an optimizer that `free_memory` has forgotten, and with which a script goes on as they are.

        transformers' Trainer does so in a second `train()`: it prepares a new optimizer for the model that it has.
        """
        models = self.run.prepared.models
        for reference in reversed(
            self._forgotten
        ):  # a module may have been prepared more than once: the last entry counts
            entry = reference()
            if entry is None or not entry.is_stepped_by(optimizer):
                continue
            if not any(entry.module is other.module for other in models):
                models.append(entry)

    @property
    def models(self) -> list[nn.Module]:
        """All models in the order in which they were prepared, also those for evaluation alone: checkpoints number them so."""
        models = [entry.module for entry in self.run.prepared.models]
        # From the last to the first: a place counts models for training alone, and inserting moves only what comes after it.
        for place, model in reversed(self._evaluated):
            is_listed = any(model is other for other in models)
            if not is_listed:
                models.insert(place, model)
        return models

    def evaluation_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Prepares a model without communication, and counts it among the models of a checkpoint."""
        self._evaluated.append((len(self.run.prepared.models), model))
        return super().evaluation_model(model, place=place)

    def clear(self) -> None:
        """Forgets everything that was prepared."""
        self._evaluated.clear()
        # A model with strategies keeps its entry alive, see `EntryOfModel`.
        self._forgotten += [weakref.ref(entry) for entry in self.run.prepared.models]
        super().clear()

    def loader(self, loader: Any, *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Prepares a loader; rank 0 reads an iterable dataset for all ranks, unless the script says otherwise."""
        earlier = self.known_loader(loader)
        if earlier is not None:
            return earlier
        self.check_width()
        run = self.run
        settings = run.settings
        is_seeded = run.plan.semantics.order == "dealt, seeded"
        prepared = prepare_data_loader(
            loader,
            run.device,
            run.plan.layout.width,
            run.plan.layout.data_index(run.world.rank),
            split_batches=settings.split_batches,
            put_on_device=place,
            rng_types=list(self._rng_types),
            dispatch_batches=settings.dispatch_batches,
            even_batches=self.tail == "pad",
            use_seedable_sampler=is_seeded or run.runtime.compares_widths,
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
        """Returns the prepared loader if the argument is one or was prepared before; else None."""
        if getattr(loader, "_is_accelerate_prepared", False):
            self.record_again([loader])
            return loader  # type: ignore[return-value]
        for prepared in self.run.prepared.loaders:
            if getattr(prepared, "source", None) is loader:
                return prepared
        return None

    def recipe_of(self, module: nn.Module, facts: ModelFacts) -> Recipe | None:
        """Returns how to initialize a model on meta; None for an offloaded one, whose weights are on meta but have values."""
        if any(map(has_offloaded_params, module.modules())):
            return None
        return super().recipe_of(module, facts)

    def _prepare_model(self, model: Any, plan: Plan, mesh: Mesh) -> None:
        """Prepares a model; what `prepare` returns for it has the class that accelerate gives it."""
        super()._prepare_model(model, plan, mesh)
        entry = self.run.prepared.models[-1]
        if plan.layout.size() != plan.layout.width:
            return
        for applied in entry.chain.strategies:
            if isinstance(applied, AveragedGradients):
                entry.wrapped = as_accelerate_wraps(entry.wrapped, applied)

    def prepare(self, objects: Sequence[Any], *args: Any, **keywords: Any) -> list[Any]:
        """Prepares objects; the models among them are marked as prepared."""
        self.record_again(objects)
        results = super().prepare(objects, *args, **keywords)
        for result in results:
            if _steps_by_windows(result) and not self.run.prepared.is_stepped_by(result):
                self._record_stepped_models(result)
            if not isinstance(result, nn.Module):
                continue
            result._is_accelerate_prepared = True  # type: ignore[assignment]
            entry = self.run.prepared.find(result, wrapped_only=True)
            if entry is not None and any(True for _ in entry.chain.strategies):
                result._paceline_entry = EntryOfModel(entry)  # type: ignore[assignment]
        return results

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that transformers divided while loading it, and every model if the wanted device is a problem.

        Raises:
            CompatValueError: `compat-argument`.
        """
        if self.device_problem is not None:
            raise self.device_problem
        self._check_place_of_quantised(model)
        ways = get_model_tp_size(model) or 1
        if ways > 1 and self.run.prepared.find(model) is None:
            raise CompatValueError(
                "compat-argument",
                f"{type(model).__name__} was divided over {ways} processes before it was prepared.",
                why="transformers divides a model that is loaded with `tp_plan` or `distributed_config`, in a form that the "
                "plan of this run does not know",
                fix=f"load it without them, and let the plan divide it: `paceline launch --tp {ways} ...`",
            )

    def _check_place_of_quantised(self, model: nn.Module) -> None:
        """Refuses a quantised model that is not on the device of this process: it cannot be moved there.

        Raises:
            CompatValueError: `compat-argument`.
        """
        is_quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if not is_quantised or len(devices) != 1 or self.run.world.size == 1:
            return
        place = devices.pop()
        index = place  # a map names a device by its number, or as torch does
        if not isinstance(place, int):
            index = torch.device(place).index
        own_index = self.run.device.index or 0
        if index != own_index:
            raise CompatValueError(
                "compat-argument",
                "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than its own.",
                why=f"it is on {place!r}, and this process uses {self.run.device}",
                fix=f"load it on this device: `device_map={{'': {own_index}}}`",
            )

    def one_by_one(self, objects: Sequence[Any], places: Sequence[bool], prepare: Callable[..., Any]) -> list[Any]:
        """Lets `prepare` prepare the objects one by one: models first, and schedulers in a second pass.

        Args:
            objects: the arguments of the script's call.
            places: for each object, whether it is moved to the device.
            prepare: is called as `prepare(object, first_pass=True, device_placement=...)`, then without `first_pass`.

        Ranks: all.
        """
        self.record_again(objects)
        model_positions: list[int] = []
        other_positions: list[int] = []
        for position, value in enumerate(objects):
            is_model = self.kind_of(value) == "model"
            if is_model:
                model_positions.append(position)
            else:
                other_positions.append(position)
        results = list(objects)
        # Models first: an optimizer is prepared for the parameters that its model has afterwards.
        for position in [*model_positions, *other_positions]:
            results[position] = prepare(results[position], first_pass=True, device_placement=places[position])
        # Schedulers in a second pass: they look for the prepared form of their optimizer.
        for position, place in enumerate(places):
            results[position] = prepare(results[position], device_placement=place)
        return results

    @contextmanager
    def tails(self, tail: Any) -> Iterator[None]:
        """Sets what epochs that begin in the block do with a short last global batch.

        If the block trains, every process takes part in every step; one that has no batch left does so with a row of weight 0.
        No backward pass of an evaluation waits for it, so there its loop ends.

        Args:
            tail: "pad" fills the batch up, "divide" leaves it short, None changes nothing.
        """
        # Both with the value that is put back after the block.
        loaders: list[tuple[DataLoaderAdapter, bool]] = []
        samplers: list[tuple[BatchSamplerShard, bool]] = []
        for loader in self.run.prepared.loaders:
            if not isinstance(loader, DataLoaderAdapter):
                continue
            loaders.append((loader, loader.takes_part))
            if isinstance(loader.batch_sampler, BatchSamplerShard):
                samplers.append((loader.batch_sampler, loader.batch_sampler.even_batches))
        trains = torch.is_grad_enabled() and any(entry.wrapped.training for entry in self.run.prepared.models)
        for loader, _ in loaders:
            loader.takes_part |= trains
        if tail is not None:
            for sampler, _ in samplers:
                sampler.even_batches = tail == "pad"
        try:
            yield
        finally:
            for loader, takes_part in loaders:
                loader.takes_part = takes_part
            for sampler, even_batches in samplers:
                sampler.even_batches = even_batches

    def optimizer(self, optimizer: Optimizer, names: Names) -> PreparedOptimizer:
        """Prepares an optimizer of any parameters, also before its model: replicas keep the parameters that a script made."""
        earlier = self.run.prepared.optimizer_of(optimizer)
        if earlier is not None:
            return earlier
        parameters = parameters_of(optimizer)
        are_prepared = all(id(parameter) in names for parameter in parameters)
        if are_prepared and any(parameter.requires_grad for parameter in parameters):
            return super().optimizer(optimizer, names)
        return self.record_optimizer(optimizer)

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares a scheduler so that it steps once for each process."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        schedule = self.run.plan.semantics.schedule
        prepared = AcceleratedScheduler(
            scheduler,
            self.run.prepared.optimizers_scheduled_by(scheduler) or list(self.stepped_elsewhere),
            step_with_optimizer=schedule != "call",
            split_batches=schedule == "step" or self.run.settings.split_batches,
            gradient_state=self._gradient_state,
        )
        self.run.prepared.schedulers.append(prepared)
        return prepared

    def record_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Records an optimizer, whose gradients may come from a plain `loss.backward()`."""
        entry = AcceleratedOptimizer(optimizer)
        self._record_optimizer(entry)
        return entry

    def _record_optimizer(self, entry: AcceleratedOptimizer) -> None:
        run = self.run
        average = None
        if run.world.size > 1:
            average = run.prepared.finish_reduction
        entry.join(run.gradients, run.scaler, run.take_step, average, run.admits, run.events.stepped)
        run.prepared.optimizers.append(entry)
        run.prepared.may_step(entry.optimizer)


def _steps_by_windows(value: object) -> TypeGuard[AcceleratedOptimizer]:
    """Whether an object is a prepared optimizer, and not one that DeepSpeed's engine steps."""
    return isinstance(value, AcceleratedOptimizer) and value.steps_by_windows


def _is_among(value: object, others: Sequence[object]) -> bool:
    return any(value is other for other in others)
