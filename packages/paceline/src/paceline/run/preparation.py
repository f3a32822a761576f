"""`Preparation`: prepares the user's objects as the plan says, and records them in `run.prepared`.

facts(model) -> resolve (rules + every strategy.check; ONE error with all problems)
  -> names of parameters -> device, precision, chain -> rebind optimizers -> loaders -> schedulers

What libraries mean by it differs, and is read from `run.plan.semantics`. A door whose prepared objects have classes of their
own subclasses `Preparation`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.base.errors import PlanError, PrepareError, Problem
from paceline.base.log import info, warn_once
from paceline.checkpoint.state.module_state import clean
from paceline.data.active import BatchesInUse
from paceline.data.loader import PreparedLoader
from paceline.data.prepare import own_division, prepare_loader, random_samples
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.rebind import parameter_names, rebind, shared_parameters
from paceline.optim.schedule import PreparedScheduler, Scheduler, compare_lengths, is_scheduler, warn_of_other_optimizer
from paceline.parallel.chain import Chain
from paceline.parallel.fused_kernels import suit_fused
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import Context, strategies_for, strategies_of
from paceline.plan.facts import ModelFacts, model_facts
from paceline.plan.options import names_of
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft_beside, resolve
from paceline.planner.exhausted import watch
from paceline.run.preparable import divided_already, loose_under_axes, may_be_loader, not_preparable, wrapped_already
from paceline.run.prepared import EntryOfModel, PreparedModel
from paceline.run.run import Run, steps_prepared_model
from paceline.torch_internals.modules import change_tensors, is_compiled
from paceline.torch_internals.optimizers import complete_hooks
from paceline.world.forward import OwnHook
from paceline.world.layout import model_axes
from paceline.world.mesh import Mesh, mesh_of
from paceline.world.param_groups import inner_optimizers, is_elementwise, parameters_of
from paceline.world.sharded import any_sharded

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from paceline.parallel.draws import PassFindings
    from paceline.parallel.materialise import Recipe

Kind = Literal["model", "optimizer", "loader", "scheduler", "parameter", "done"]
Names = dict[int, tuple[int, str]]  # id of a parameter before the chain -> number of its model, name


@dataclass(frozen=True)
class _NewModel:
    """A model that was not prepared before.

    Attributes:
        module: the user's model.
        facts: what planning needs to know of it.
        is_moved: whether it is moved to this rank's device.
        recipe: how it is initialized, if it was built on the meta device.
        is_trained_here: whether this run trains it.
    """

    module: nn.Module
    facts: ModelFacts
    is_moved: bool
    recipe: Recipe | None
    is_trained_here: bool


class Preparation:
    """Prepares objects for one run.

    Args:
        run: the run that records them; it adopts the plan that is resolved for the models.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._seed: int | None = None
        self._epoch_lengths: list[tuple[int, int]] = []  # of each loader, in batches: before and after it was prepared
        run.events.several_batches.subscribe(self._trace_origins)
        run.events.outside_loops.subscribe(self._watch_calls)
        self._is_outside_loops = False  # of which it has left one
        self._watching_calls: list[RemovableHandle] = []
        self._semantics = run.plan.semantics
        if self._semantics.unprepared_optimizers == "refused":
            run.events.before_step.subscribe(run.prepared.refuse_unprepared)
        if run.world.size > 1 and run.runtime.others_answer:
            from paceline.optim.unprepared import UnpreparedModels  # what only several ranks can do wrong

            run.events.before_step.subscribe(UnpreparedModels(run.world, steps_prepared_model).look)

    def prepare(
        self,
        objects: Sequence[Any],
        placement: Sequence[bool] | None = None,
        plan: Mapping[str, Any] | None = None,
        *,
        trains: bool = True,
    ) -> list[Any]:
        """Prepares objects of any kind in any order; see `Accelerator.prepare`.

        Args:
            objects: the user's objects.
            placement: for each object, whether it is moved to the device; None moves all.
            plan: settings of another plan than the run's, for these models.
            trains: False if another run trains these models: this one reduces no gradients of them.
        """
        # Every object is looked at before any is changed, so that a wrong one is refused while all are as they were.
        kinds = [self.kind_of(value) for value in objects]
        places = _checked_placement(placement, len(objects))
        numbers: dict[Kind, list[int]] = {kind: [] for kind in get_args(Kind)}
        for number, kind in enumerate(kinds):
            numbers[kind].append(number)
        models = [(objects[number], places[number]) for number in numbers["model"]]
        optimizers = [objects[number] for number in numbers["optimizer"]]
        loaders = [objects[number] for number in numbers["loader"]]
        other_plan: Plan | None = None
        if plan is not None:
            other_plan = draft_beside(self.run.plan, plan, self.run.world.size)
        if self.run.world.size > 1 and self.run.runtime.others_answer:
            from paceline.run.started_states import take_first_ranks_states  # one process has nobody to differ from

            for optimizer in optimizers:
                if self._has_whole_states(optimizer):
                    take_first_ranks_states(optimizer, self.run.collectives)
        with nullcontext() if trains else _frozen([model for model, _ in models]):
            names = self._prepare_models(models, optimizers, loaders, other_plan, trains)
            self._prepare_loose([objects[number] for number in numbers["parameter"]], names)

        # The order matters: an optimizer needs the parameters of prepared models, a scheduler compares its length with the
        # loaders' and needs its prepared optimizer. The results go back in the user's order.
        result = list(objects)
        for number in numbers["model"]:
            entry = self.run.prepared.find(objects[number])
            assert entry is not None
            result[number] = entry.wrapped
        for number in numbers["loader"]:
            result[number] = self.loader(objects[number], place=places[number])
        for number in numbers["optimizer"]:
            result[number] = self.optimizer(objects[number], names)
        for number in numbers["scheduler"]:
            result[number] = self.scheduler(objects[number])
        return result

    def kind_of(self, value: object) -> Kind:
        """Returns the kind of an object; "done" if it is returned unchanged.

        Raises:
            PrepareError: `prepare-kind`, `prepare-forgotten`.
        """
        if value is None:
            return "done"
        if isinstance(value, (PreparedOptimizer, PreparedScheduler)):
            self.run.prepared.check_known(value)
            return "done"
        if isinstance(value, nn.Module):
            if self.run.prepared.find(value, wrapped_only=True):
                return "done"
            if isinstance(value, (DataParallel, DistributedDataParallel)):
                is_refused = self._semantics.unprepared_optimizers == "refused" or self.run.is_divided()
                if is_refused:
                    raise wrapped_already(value)
            return "model"
        if isinstance(value, Optimizer):
            return "optimizer"
        if is_scheduler(value):
            return "scheduler"
        if may_be_loader(value):
            return "loader"
        if self._semantics.unknown_objects == "returned":
            return "done"
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            # It can be averaged where ranks divide samples, and not layers or sequences.
            layout = self.run.plan.layout
            if layout.size() != layout.width:
                raise loose_under_axes(layout)
            return "parameter"
        raise not_preparable(value)

    # -- models --------------------------------------------------------------------------------------------------

    def _prepare_models(
        self,
        models: Sequence[tuple[nn.Module, bool]],
        optimizers: Sequence[Optimizer],
        loaders: Sequence[Any],
        other: Plan | None,
        trains: bool,
    ) -> Names:
        """Prepares the models of one call.

        Args:
            models: each with whether it is moved to the device.
            optimizers, loaders: those of the same call, which are only checked here.
            other: another plan than the run's, for these models.
            trains: whether this run trains them.

        Returns:
            The names of all parameters, by the ids that these had before strategies replaced them.
        """
        run = self.run
        run.events.preparing([module for module, _ in models])
        new = self._new_models(models, other or run.plan, trains)
        # Names are recorded before anything changes, since a strategy may replace every parameter. `rebind` then finds the
        # new parameter of each old one by its name.
        names = self._names(new)
        problems = self._problems(new, optimizers, loaders, names, other or run.plan)
        # A call with optimizers or loaders alone has no plan to resolve.
        if not new:
            if problems:
                raise PlanError.of(problems)
            run.events.prepared([])
            return names

        if run.world.size > 1:
            problems += self._problems_of_ranks(new, other or run.plan)
        plan = self._laid_out(new, other)
        mesh = run.mesh if other is None else mesh_of(plan.layout, run.world, run.device.type)
        plan = self._resolved(plan, new, problems)
        for model in new:
            self._prepare_model(model, plan, mesh)
        if other is None:
            run.resolve(plan)
        _tell(plan, new, on_host=not run.runtime.accelerated(run.device))
        run.events.prepared([model.module for model in new])
        return names

    def _new_models(self, models: Sequence[tuple[nn.Module, bool]], plan: Plan, trains: bool) -> list[_NewModel]:
        """Returns the models that were not prepared before.

        Raises:
            PrepareError: `prepare-kind`, if a script has divided one.
        """
        declared = names_of(plan.options.get("experts", {}).get("modules", ()))
        new: list[_NewModel] = []
        for module, is_moved in models:
            if self.run.prepared.find(module) is None and not self._take_up_again(module):
                if _is_divided_by_script(module):
                    raise divided_already()
                facts = model_facts(module, declared)
                new.append(_NewModel(module, facts, is_moved, self.recipe_of(module, facts), trains))
        return new

    def _names(self, new: Sequence[_NewModel]) -> Names:
        """Returns the names of all parameters, those included that prepared models had before strategies replaced them."""
        prepared = self.run.prepared.models
        names = parameter_names([*(entry.module for entry in prepared), *(model.module for model in new)])
        # An optimizer may be prepared after its model, and holds the parameters that the model had before.
        for number, entry in enumerate(prepared):
            for parameter, name in entry.given_parameters():
                names.setdefault(id(parameter), (number, name))
        return names

    def _laid_out(self, new: Sequence[_NewModel], other: Plan | None) -> Plan:
        """Returns the plan of new models with its layout, which "auto" leaves open until they are known. Ranks: all."""
        run = self.run
        plan = other or run.plan
        if not plan.open:
            return plan
        from paceline.planner.fit import fit  # a search, which few plans ask for

        # Layouts must agree, so rank 0's memory decides for all.
        local_size = run.world.local_size
        of_rank = run.runtime.memory(run.device, local_size), run.runtime.host_memory(local_size)
        memory, host = run.collectives.broadcast_object(of_rank)
        plan = fit(
            plan, [model.facts for model in new], not run.runtime.accelerated(run.device), run.world, memory, host
        )
        if other is None:
            run.lay_out(plan)
        return plan

    def _resolved(self, plan: Plan, new: Sequence[_NewModel], problems: list[Problem]) -> Plan:
        """Returns the plan with the strategies of new models.

        Raises:
            PlanError: of all problems, those of the strategies included.
        """
        # Strategies of an earlier `prepare` were derived from its own models, so they are decided anew.
        decisions = tuple(decision for decision in plan.decisions if decision.field != "strategies")
        plan = replace(plan, strategies=(), decisions=decisions)
        facts = [model.facts for model in new]
        return resolve(plan, facts, strategies_for(plan, facts), problems)

    def _prepare_loose(self, given: Sequence[Tensor], names: Names) -> None:
        """Prepares parameters that are in no model, which the script has passed to `prepare`.

        Args:
            given: these parameters.
            names: the names of all parameters; those of the new ones are added.
        """
        tensors = {id(tensor): tensor for tensor in given if id(tensor) not in names}
        if not tensors:
            return
        from paceline.run.loose_parameters import LooseParameters  # few loops have any

        width = self.run.plan.layout.width
        whole = draft_beside(self.run.plan, {"zero": 0, "shard": 1, "ep": 1, "replicate": width}, self.run.world.size)
        number = len(self.run.prepared.models)
        module = LooseParameters(tensors.values())
        self._prepare_models([(module, True)], [], [], whole, trains=True)
        for name, parameter in module.named_parameters():
            names[id(parameter)] = (number, name)

    def _has_whole_states(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer was neither prepared before, nor made of what this rank has of a prepared model."""
        parameters = list(parameters_of(optimizer))
        if OptimizerAdapter.known(optimizer) is not None or any_sharded(parameters):
            return False
        if not any(strategy.removes_parameters for strategy in strategies_of(self.run.plan)):
            return True
        of_stages = {id(each) for entry in self.run.prepared.models for each in entry.module.parameters()}
        return of_stages.isdisjoint(map(id, parameters))

    def _take_up_again(self, module: nn.Module) -> bool:
        """Records a model again that this plan has prepared and `free_memory` has forgotten. Returns False for any other."""
        entry = EntryOfModel.of(module)
        if entry is None:
            return False
        if entry.chain.plan.layout == self.run.plan.layout and entry.chain.plan.zero == self.run.plan.zero:
            self.run.prepared.models.append(entry)
            return True
        for applied in entry.chain.strategies:
            applied.release()
        return False

    def _problems(
        self,
        new: Sequence[_NewModel],
        optimizers: Sequence[Optimizer],
        loaders: Sequence[Any],
        names: Names,
        plan: Plan,
    ) -> list[Problem]:
        """Returns the problems of the objects themselves, whatever the plan."""
        prepared = [entry.optimizer for entry in self.run.prepared.optimizers]
        problems = shared_parameters(list(dict.fromkeys([*prepared, *optimizers])), names)
        prepared_modules = [entry.module for entry in self.run.prepared.models]
        modules = [*prepared_modules, *(model.module for model in new)]
        refusing = [strategy for strategy in strategies_of(plan) if strategy.keeps_apart(plan)]
        if refusing:
            from paceline.parallel.model_problems import shared_models

            remedy = ", and ".join(strategy.keeps_apart(plan) for strategy in refusing)
            frozen_too = any(strategy.replaces_parameters for strategy in refusing)
            problems += shared_models(modules, remedy, frozen_too=frozen_too)
        for model in new:
            if model.recipe is not None:
                problems += model.recipe.missing(model.facts.name)
        originals = [getattr(loader, "original", None) for loader in self.run.prepared.loaders]
        return problems + _collation_problems(modules, [*originals, *loaders])

    def _problems_of_ranks(self, new: Sequence[_NewModel], plan: Plan) -> list[Problem]:
        """Returns the problems of models that several ranks share or divide. Ranks: all."""
        from paceline.parallel.model_problems import differing_models, float8_gathers, misplaced, without_shapes

        problems: list[Problem] = []
        for model in new:
            problems += float8_gathers(model.module, model.facts, plan)
            problems += misplaced(model.facts, model.is_moved, self.run.device)
            problems += without_shapes(model.facts)
        return problems + differing_models([(model.module, model.facts) for model in new], self.run.collectives)

    def recipe_of(self, module: nn.Module, facts: ModelFacts) -> Recipe | None:
        """Returns how a model on the meta device is initialized; None for a model that has values."""
        if not facts.meta:
            return None
        from paceline.parallel.materialise import Recipe  # few models come from the meta device

        return Recipe(module)

    def _prepare_model(self, model: _NewModel, plan: Plan, mesh: Mesh) -> None:
        """Moves one model, wraps its forward in the run's precision, applies the chain, and records it."""
        run = self.run
        module = model.module
        facts = model.facts
        replaces_parameters = _replaces_parameters(plan)
        if model.is_moved and facts.meta:
            # Only the tensors that have values are moved: `Module.to` refuses tensors on the meta device.
            change_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(run.device))
        elif model.is_moved:
            _move(module, run.device, facts.tied)
        # A model on the meta device is initialized before the chain only if the chain leaves its parameters whole. If they are
        # sharded, each rank initializes its shards afterwards, and no rank ever holds the whole model.
        if model.recipe is not None and not replaces_parameters:
            self._materialise(model.recipe, module, run.device)
        run.precision.wrap_forward(module, run.device)
        # Taken before the chain, under which a rank of a pipeline holds only some of them.
        names = tuple(map(clean, module.state_dict(keep_vars=True)))
        given: list[tuple[weakref.ref[Tensor], str]] = []
        gradients: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            given.append((weakref.ref(parameter), name))
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        context = Context(
            plan,
            mesh,
            run.collectives,
            run.device,
            facts,
            idle=lambda: run.active_loaders.idle,
            siblings=run.prepared.applied_strategies,
            runtime=run.runtime,
            events=run.events,
        )
        chain = Chain.apply(module, context)
        if gradients:
            # A loop that clears gradients before each backward pass leaves those of its last one, and so do frozen optimizers.
            from paceline.parallel.divided_parameters import carry_gradients

            carry_gradients(gradients, chain.module)
        entry = PreparedModel(chain.wrapped, chain, facts, names, tuple(given), model.is_trained_here)
        if model.recipe is not None and replaces_parameters:
            device = run.device
            if any(applied.parameters_on_host for applied in chain.strategies):
                device = torch.device("cpu")
            self._materialise(model.recipe, entry.module, device)
        if entry.wrapped is not entry.module or "forward" in vars(entry.module):
            watch(entry.wrapped, run.situation)
        run.prepared.models.append(entry)
        if run.active_loaders.in_use > BatchesInUse.NEWEST:
            run.active_loaders.origins.watch(entry.wrapped)
        elif self._is_outside_loops:
            self._watch_calls_of(entry)
        if plan.layout.width > 1:
            self._watch_for_differences(entry)
        if run.phases is not None:
            run.phases.follow_model(entry.wrapped)
            if chain.runner is not None:
                chain.runner.follow(run.events.phase.__getitem__)
            for applied in chain.strategies:
                applied.call_before_waiting(run.phases.reduce)

    def _trace_origins(self) -> None:
        """From now on, models show from which batch a loss was computed: the script may have several."""
        for entry in self.run.prepared.models:
            self.run.active_loaders.origins.watch(entry.wrapped)

    def _watch_calls(self, begins: bool) -> None:
        """While the script is outside of all loops, its calls of models may show that it has kept batches."""
        for handle in self._watching_calls:
            handle.remove()
        self._watching_calls.clear()
        self._is_outside_loops = begins
        if begins:
            for entry in self.run.prepared.models:
                self._watch_calls_of(entry)

    def _watch_calls_of(self, entry: PreparedModel) -> None:
        # A weak reference: a model may outlive its run.
        reference = weakref.ref(self.run.active_loaders)

        def called(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            loaders = reference()
            if loaders is not None:
                loaders.called_outside(model, args, kwargs)

        handle = entry.wrapped.register_forward_pre_hook(OwnHook(called), with_kwargs=True, prepend=True)
        self._watching_calls.append(handle)

    def _materialise(self, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        """Initializes a model from the meta device with rank 0's seed: values are the same on all ranks and under every plan.

        Ranks: all.
        """
        seed = int(self.run.collectives.broadcast_object(torch.initial_seed()))
        recipe.run(model, device, seed)

    def _watch_for_differences(self, entry: PreparedModel) -> None:
        """Looks, where ranks read different samples, at what a model does that differs from one process by itself."""
        from paceline.plan import randomness

        plan = entry.chain.plan
        # The first pass is watched for random numbers, whose order depends on the number of ranks, and for buffers. Not under
        # compile, since the hooks would make torch compile each block a second time. And not along tp, cp and pp, where
        # strategies seed the generators themselves.
        compiled = plan.compile or is_compiled(entry.module)
        if plan.layout.size() == plan.layout.width and not compiled:
            from paceline.parallel.draws import watch_first_pass

            watch_first_pass(entry.module, self.run.device, partial(self._note_first_pass, entry.facts))
        for applied in entry.chain.strategies:
            applied.call_with_others(partial(self._note, randomness.adapted_weights(entry.facts.name)))

    def _note_first_pass(self, facts: ModelFacts, findings: PassFindings) -> None:
        """Adds to the plan what the first pass has shown; see `randomness.of_first_pass`."""
        from paceline.plan import randomness

        drew, buffers, tensors = findings.drew, findings.changed_buffers, findings.changed_tensors
        for decision in randomness.of_first_pass(self.run.plan, facts, drew, buffers, tensors):
            self._note(decision)

    def _note(self, decision: Decision) -> None:
        """Adds to the plan what passes have shown."""
        self.run.note(decision)
        info("plan", str(decision))

    def evaluation_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Moves a model to the device and wraps its forward in the run's precision, without communication."""
        if place:
            model.to(self.run.device)
        self.run.precision.wrap_forward(model, self.run.device)
        return model

    # -- optimizers, loaders, schedulers -----------------------------------------------------------------------------

    def optimizer(self, optimizer: Optimizer, names: Names) -> PreparedOptimizer:
        """Prepares one optimizer, whose models are prepared already.

        Args:
            optimizer: the user's.
            names: the names of the parameters with which it was built, by id.
        """
        prepared = self.run.prepared
        prepared_already = prepared.optimizer_of(optimizer)
        if prepared_already is not None:
            return prepared_already
        complete_hooks(optimizer)
        tied = None
        # A rank of a pipeline has only the parameters of its stages. A tied one may be there under any of its names.
        if any(strategy.removes_parameters for strategy in strategies_of(self.run.plan)):
            from paceline.parallel.sums import refuse_sums  # few plans have stages

            refuse_sums(optimizer, self.run.device)
            tied = [model.facts.tied for model in prepared.models]
        modules = [model.module for model in prepared.models]
        own_groups = set(map(id, optimizer.param_groups))
        inner = inner_optimizers(optimizer)
        # The optimizer inside of SAM shares its groups.
        sharing = [each for each in inner if not own_groups.isdisjoint(map(id, each.param_groups))]
        rebind(optimizer, names, modules, tied, sharing)
        self._adapt(optimizer)
        for each in inner:
            if each not in sharing:
                rebind(each, names, modules, tied)
            self._adapt(each)
        return self.record_optimizer(optimizer)

    def _adapt(self, optimizer: Optimizer) -> None:
        """Lets strategies adapt an optimizer that holds the prepared parameters, and chooses its kernels."""
        adapter = OptimizerAdapter.of(optimizer)
        _bind(adapter, self.run)
        if not is_elementwise(optimizer):
            # Imported here: few runs have one of these.
            from paceline.optim import rounding

            for decision in rounding.decisions_about(optimizer):
                self.run.note(decision)
        # States that the optimizer has already follow its parameters to the device. Numbers, such as Adam's step counter, stay
        # where they are: torch keeps them on the CPU.
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(self.run.device)
        suit_fused(adapter)

    def record_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Wraps and records an optimizer that holds the prepared parameters."""
        run = self.run
        entry = PreparedOptimizer(optimizer, run.gradients, run.scaler, run.take_step, run.admits, run.events.stepped)
        run.prepared.optimizers.append(entry)
        run.prepared.may_step(optimizer)
        return entry

    def loader(self, loader: DataLoader[Any], *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Prepares one loader.

        Args:
            loader: the user's.
            place: whether its batches are moved to the device.
            chosen: keyword arguments of `prepare_loader` that replace the run's settings.

        Ranks: all; the first call broadcasts the seed.

        Raises:
            PlanError: `plan-open`.
            DataError: those of `prepare_loader`.
        """
        run = self.run
        prepared_loader = self.known_loader(loader)
        if prepared_loader is not None:
            return prepared_loader
        self.check_width()
        if self._seed is None:
            # Rank 0's seed counts, also if the script has seeded its ranks differently: all ranks must shuffle alike, since
            # each takes its part of one order.
            seed = run.settings.data_seed
            if seed is None:
                seed = torch.initial_seed()
            self._seed = int(run.collectives.broadcast_object(seed))
        # "pad" repeats rows so that all ranks get equally many; "divide" gives each its part of what is there.
        options = {"tail": run.plan.semantics.tail, "dispatch": run.settings.dispatch_batches, **chosen}
        device = run.device if place else torch.device("cpu")
        prepared = prepare_loader(
            loader,
            width=run.plan.layout.width,
            index=run.plan.layout.data_index(run.world.rank),
            device=device,
            seed=self._seed,
            drawn=run.settings.data_seed is None,
            all_ranks=run.collectives,
            accumulate=run.plan.accumulate,
            split_batches=run.settings.split_batches,
            collectives=run.data_ranks,
            active=run.active_loaders,
            non_blocking=run.settings.non_blocking,
            **options,
        )
        return self.record_loader(loader, prepared)

    def known_loader(self, loader: object) -> PreparedLoader | None:
        """Returns the prepared loader, if this is one or was prepared before."""
        if isinstance(loader, PreparedLoader):
            return loader
        for prepared_loader in self.run.prepared.loaders:
            if getattr(prepared_loader, "original", None) is loader:
                return prepared_loader
        return None

    def check_width(self) -> None:
        """Checks that it is known by now how many ranks read different samples.

        Raises:
            PlanError: `plan-open`.
        """
        # `shard` and `replicate` may still be open: however ranks are divided between them, their product is the same.
        open_axes = [axis for axis in model_axes() if axis in self.run.plan.open]
        if open_axes:
            raise PlanError(
                "plan-open",
                "a loader was prepared before the model whose size decides how many ranks share its samples.",
                why=f"{', '.join(open_axes)} stand on auto",
                fix="prepare them together: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`",
            )

    def record_loader(self, loader: DataLoader[Any], prepared: PreparedLoader) -> PreparedLoader:
        """Records a prepared loader, and the length of its epoch before and after."""
        run = self.run
        run.prepared.loaders.append(prepared)
        for decision in (random_samples(prepared), own_division(prepared)):
            if decision is not None:
                run.note(decision)
        # Over an iterable dataset without a length, `len(loader)` raises.
        if hasattr(getattr(loader, "dataset", None), "__len__"):
            with suppress(TypeError):  # nor has a sampler always a length
                self._epoch_lengths.append((len(loader), len(prepared)))
        return prepared

    def scheduler(self, scheduler: Scheduler) -> PreparedScheduler:
        """Prepares one scheduler; its optimizer should be prepared already."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        run = self.run
        compare_lengths(scheduler, self._epoch_lengths, run.gradients.steps, run.plan.layout.width)
        warn_of_other_optimizer(scheduler, [entry.optimizer for entry in run.prepared.optimizers])
        prepared = PreparedScheduler(scheduler, run.prepared.optimizers_scheduled_by(scheduler), run.gradients)
        run.prepared.schedulers.append(prepared)
        return prepared

    def clear(self) -> None:
        """Forgets everything that was prepared, and empties the cache of the device."""
        self.run.prepared.clear()
        self.run.gradients.reset()
        self._epoch_lengths.clear()
        if self.run.device.type != "cpu":
            torch.accelerator.empty_cache()


def _bind(adapter: OptimizerAdapter, run: Run) -> None:
    """Lets the strategies of each model adapt an optimizer that steps it, also where it gets parameters of the model later."""
    bound: weakref.WeakSet[PreparedModel] = weakref.WeakSet()
    steps_divided = False
    # An optimizer may outlive its run.
    reference = weakref.ref(run)

    def stepped(parameters: Iterable[Tensor]) -> list[Tensor]:
        present = reference()
        models = [] if present is None else present.prepared.models
        for model in models:
            parameters = model.chain.shards_of(parameters)
        return list(parameters)

    def bind(optimizer: Optimizer) -> None:
        nonlocal steps_divided
        present = reference()
        if present is None:
            return
        new = [model for model in present.prepared.models if model not in bound and model.is_stepped_by(optimizer)]
        for model in new:
            bound.add(model)
            decisions: list[Decision] = []
            with adapter.binding():
                for applied in model.chain.strategies:
                    decisions += applied.bind(adapter)
            for decision in decisions:
                present.note(decision)
        # After all models: until then it is not known of which parameters one rank keeps the whole states. A model whose other
        # parameters are whole may be bound already when a group adds its divided ones.
        if not steps_divided and any_sharded(parameters_of(optimizer)):
            from paceline.parallel.assigned_data import copy_assigned_data
            from paceline.parallel.divided_parameters import take_whole_states
            from paceline.parallel.stand_ins import step_local_parts

            steps_divided = True
            take_whole_states(optimizer)
            copy_assigned_data(adapter)
            step_local_parts(adapter)

    bind(adapter.optimizer)
    adapter.follow_groups(stepped, bind)


def _is_divided_by_script(module: nn.Module) -> bool:
    """Returns whether parameters are DTensors that no strategy has made, as one has of a model that was prepared before."""
    ours: set[Tensor] = set()
    for part in module.modules():
        if EntryOfModel.of(part) is not None:
            ours.update(part.parameters())
    return any_sharded(parameter for parameter in module.parameters() if parameter not in ours)


def _move(module: nn.Module, device: torch.device, tied: Sequence[Sequence[str]]) -> None:
    """Moves a model to a device, and keeps its tied parameters tied.

    On some devices, such as XLA's, `Module.to` puts a new parameter under each name of a tied one.

    Args:
        module: the model.
        device: where it goes.
        tied: groups of names that belong to one parameter each.
    """
    module.to(device)
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)


@contextmanager
def _frozen(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no parameter of the models needs a gradient; afterwards those that did need it again."""
    trained: list[tuple[nn.Module, set[str]]] = []
    for model in models:
        names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        trained.append((model, names))
        model.requires_grad_(False)
    try:
        yield
    finally:
        # By name: strategies may have replaced the parameters.
        for model, names in trained:
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.requires_grad_(True)


def _tell(plan: Plan, new: Sequence[_NewModel], on_host: bool) -> None:
    """Logs the plan, and what it divides of each new model; `on_host` as in `Need`."""
    info("plan", plan.explain())
    if plan.layout.size() == 1:
        return
    from paceline.planner.estimate import division_of  # one process divides nothing

    for model in new:
        line = division_of(plan, model.facts, on_host)
        if line:
            warn_once("plan", line)


def _collation_problems(models: Sequence[nn.Module], loaders: Sequence[object]) -> list[Problem]:
    """Returns why no model can take what loaders make of samples, as far as their functions for that say it."""
    checks: list[Callable[[Sequence[nn.Module]], list[Problem]]] = []
    for loader in loaders:
        check = getattr(getattr(loader, "collate_fn", None), "problems_with", None)
        if check is not None and check not in checks:
            checks.append(check)
    problems: list[Problem] = []
    for check in checks:
        problems += check(models)
    return problems


def _replaces_parameters(plan: Plan) -> bool:
    """Returns whether strategies replace the model's parameters, for example by shards."""
    return any(strategy.replaces_parameters for strategy in strategies_of(plan))


def _checked_placement(placement: object, count: int) -> list[bool]:
    """Returns `device_placement` as a list with one entry for each object; None moves all.

    Raises:
        PrepareError: `prepare-placement`, if it is not a list or has another length.
    """
    if placement is None:
        return [True] * count
    if isinstance(placement, Sequence) and not isinstance(placement, str) and len(placement) == count:
        return list(placement)
    given = f"{len(placement)} entries" if isinstance(placement, list | tuple) else repr(placement)
    raise PrepareError(
        "prepare-placement",
        f"device_placement does not say for each of {count} objects whether it is moved.",
        why=f"it is {given}",
        fix=f"write device_placement={[True] * count}, with False for what stays where it is; or leave it out",
    )
