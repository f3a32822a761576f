"""`Preparation`: takes the user's objects through the plan; what comes out is recorded in `run.prepared`.

facts(model) -> resolve (rules + every strategy.check; ONE error with all problems)
  -> names of parameters -> device, precision, chain -> rebind optimizers -> loaders -> schedulers

Another library's door (`compat/`) that prepares with other manners subclasses `Preparation`, overrides `kind_of`, `loader`,
`optimizer` and `scheduler`, and names its class in its `Accelerator._preparation_class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from paceline.base.errors import PlanError, PrepareError, Problem
from paceline.base.log import logger, warn_once
from paceline.checkpoint.state.module_state import clean
from paceline.data.loader import PreparedLoader
from paceline.data.prepare import prepare_loader
from paceline.observe.profiles import Profiles
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.rebind import choose_fused, parameter_names, rebind, shared_parameters, started_optimizers
from paceline.optim.schedule import PreparedScheduler, Scheduler, compare_lengths, is_scheduler
from paceline.optim.unprepared import UnpreparedModels
from paceline.parallel.chain import Chain
from paceline.parallel.draws import watch_first_pass
from paceline.parallel.materialise import Recipe
from paceline.parallel.stand_ins import step_local_parts
from paceline.parallel.strategy import STRATEGIES, AppliedStrategy, Context, strategies_of
from paceline.plan import randomness
from paceline.plan.facts import ModelFacts, model_facts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner import fit
from paceline.planner.estimate import division_of
from paceline.planner.exhausted import watch
from paceline.prepared import PreparedModel
from paceline.run import Run
from paceline.world import runtime
from paceline.world.layout import DATA_AXES, model_axes
from paceline.world.mesh import Mesh

Kind = Literal["model", "optimizer", "loader", "scheduler", "done"]
Names = dict[int, tuple[int, str]]  # id of a parameter before the chain -> number of its model, name


@dataclass(frozen=True)
class _NewModel:
    """A model that was not prepared before.

    Attributes:
        is_moved: whether it goes to this rank's device.
        recipe: how it gets its values, where it was built on the meta device.
    """

    module: nn.Module
    facts: ModelFacts
    is_moved: bool
    recipe: Recipe | None


class Preparation:
    """Prepares objects for one run.

    Args:
        run: where they are recorded; its plan becomes that of the models.
        profiles: what measures the run, or None.

    Attributes:
        refuses_unprepared: whether an optimizer of prepared models that was not prepared itself may not step.
    """

    refuses_unprepared: ClassVar[bool] = True

    def __init__(self, run: Run, profiles: Profiles | None = None) -> None:
        self.run = run
        self._profiles = profiles
        self._seed: int | None = None
        self._epoch_lengths: list[tuple[int, int]] = []  # of each loader, in batches: before and after it was prepared
        if self.refuses_unprepared:
            run.events.before_step.subscribe(run.prepared.refuse_unprepared)
        if run.world.size > 1 and runtime.current().others_answer:
            run.events.before_step.subscribe(UnpreparedModels(run.world, run.prepared.is_stepped_by).look)

    def prepare(
        self,
        objects: Sequence[Any],
        placement: Sequence[bool] | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Prepares objects of any kind in any order; see `Accelerator.prepare`.

        Args:
            plan: settings of another plan than the run's, for these models.
        """
        kinds = [self.kind_of(value) for value in objects]
        places = [True] * len(objects)
        if placement is not None:
            places = _checked_placement(placement, len(objects))
        models: list[tuple[nn.Module, bool]] = []
        optimizers: list[Optimizer] = []
        for value, kind, place in zip(objects, kinds, places, strict=True):
            if kind == "model":
                models.append((value, place))
            elif kind == "optimizer":
                optimizers.append(value)
        names = self._prepare_models(models, optimizers, None if plan is None else self._plan_beside(plan))

        # Loaders before optimizers before schedulers, which need what came before them; the results in the user's order.
        result = list(objects)
        for wanted in ("model", "loader", "optimizer", "scheduler"):
            for position, value in enumerate(objects):
                if kinds[position] != wanted:
                    continue
                if wanted == "model":
                    entry = self.run.prepared.find(value)
                    assert entry is not None
                    result[position] = entry.wrapped
                elif wanted == "loader":
                    result[position] = self.loader(value, place=places[position])
                elif wanted == "optimizer":
                    result[position] = self.optimizer(value, names)
                else:
                    result[position] = self.scheduler(value)
        return result

    def kind_of(self, value: object) -> Kind:
        """What an object is; "done" for one that goes back as it is.

        Raises:
            PrepareError: `prepare-kind`.
        """
        if value is None or isinstance(value, (PreparedOptimizer, PreparedScheduler)):
            return "done"
        if isinstance(value, nn.Module):
            return "done" if self.run.prepared.find(value, wrapped_only=True) else "model"
        if isinstance(value, Optimizer):
            return "optimizer"
        if is_scheduler(value):
            return "scheduler"
        if hasattr(value, "__iter__") and not isinstance(value, (str, bytes, dict, list, tuple, torch.Tensor)):
            return "loader"
        raise _refused(value)

    # -- models --------------------------------------------------------------------------------------------------

    def _prepare_models(
        self, models: Sequence[tuple[nn.Module, bool]], optimizers: Sequence[Optimizer], other: Plan | None
    ) -> Names:
        """Prepares models, each with whether it is moved; returns the names of all parameters from before.

        Args:
            optimizers: those of the same call.
            other: another plan than the run's, for these models.
        """
        run = self.run
        surroundings = runtime.current()
        surroundings.preparing(run, [module for module, _ in models])
        new: list[_NewModel] = []
        for module, is_moved in models:
            if run.prepared.find(module) is None:
                facts = model_facts(module)
                new.append(_NewModel(module, facts, is_moved, self.recipe_of(module, facts)))
        # Names are taken before anything is touched: strategies may replace every parameter.
        prepared_modules = [entry.module for entry in run.prepared.models]
        names = parameter_names(prepared_modules + [model.module for model in new])
        problems = self._problems(new, optimizers, names, other or run.plan)
        if not new:
            if problems:
                raise PlanError.of(problems)
            surroundings.prepared(run)
            return names

        facts_of_new = [model.facts for model in new]
        plan = other or run.plan
        mesh = run.mesh
        if plan.open:
            memory = run.collectives.broadcast_object(surroundings.memory(run.device, run.world.local_size))
            plan = fit.fit(plan, facts_of_new, run.world, memory)
            if other is None:
                run.lay_out(plan)
                mesh = run.mesh
        if other is not None:
            mesh = Mesh(plan.layout, run.world, run.device.type)
        # Without what an earlier `prepare` derived from its own models.
        decisions = tuple(decision for decision in plan.decisions if decision.field != "strategies")
        plan = resolve(replace(plan, strategies=(), decisions=decisions), facts_of_new, STRATEGIES, problems)
        for model in new:
            self._prepare_model(model, plan, mesh)
        if other is None:
            run.resolve(plan)
        logger("plan").info("%s", plan.explain())
        for facts in facts_of_new:
            line = division_of(plan, facts)
            if line:
                warn_once("plan", line)
        surroundings.prepared(run)
        run.events.prepared()
        return names

    def _problems(
        self, new: Sequence[_NewModel], optimizers: Sequence[Optimizer], names: Names, plan: Plan
    ) -> list[Problem]:
        """What is wrong with the objects themselves, before any plan."""
        prepared = [entry.optimizer for entry in self.run.prepared.optimizers]
        problems = shared_parameters(list(dict.fromkeys([*prepared, *optimizers])), names)
        if _replaces_parameters(plan):
            replaced: set[int] = set()
            for model in new:
                replaced.update(map(id, model.module.parameters()))
            unprepared = [optimizer for optimizer in optimizers if optimizer not in prepared]
            problems += started_optimizers(unprepared, replaced)
        for model in new:
            problems += self._misplaced(model)
            if model.recipe is not None:
                problems += model.recipe.missing(model.facts.name)
        return problems

    def recipe_of(self, module: nn.Module, facts: ModelFacts) -> Recipe | None:
        """How a model gets its values; None where it has them."""
        return Recipe(module) if facts.meta else None

    def _misplaced(self, model: _NewModel) -> list[Problem]:
        """What is wrong with where a model is, on several ranks, each of which has one device."""
        devices = model.facts.devices
        name = model.facts.name
        here = str(self.run.device)
        if self.run.collectives.size == 1 or not devices:
            return []
        if len(devices) > 1:
            what = f"{name} lies on several devices."
            fix = f"move it to one before `prepare`: `model.to({here!r})`"
        elif not model.is_moved and torch.device(devices[0]) != self.run.device:
            what = f"{name} is not on this rank's device."
            fix = "leave `device_placement` out, and it is moved there"
        else:
            return []
        why = f"its tensors are on {', '.join(devices)}; this rank computes on {here}"
        return [Problem("model-device", what, why=why, fix=fix)]

    def _prepare_model(self, model: _NewModel, plan: Plan, mesh: Mesh) -> None:
        """Moves one model, lets it compute in the run's precision, applies the chain, and records it."""
        run = self.run
        module = model.module
        facts = model.facts
        if model.is_moved and facts.meta:
            # `to` refuses a tensor without values.
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(run.device))
        elif model.is_moved:
            _move(module, run.device, facts.tied)
        # Where the chain divides parameters, values come after it: no rank ever holds the whole model.
        if model.recipe is not None and not _replaces_parameters(plan):
            self._materialise(model.recipe, module, run.device)
        run.precision.wrap_forward(module, run.device)
        names = tuple(map(clean, module.state_dict(keep_vars=True)))

        def siblings() -> list[AppliedStrategy]:
            applied: list[AppliedStrategy] = []
            for entry in run.prepared.models:
                applied += entry.chain
            return applied

        context = Context(
            plan, mesh, run.collectives, run.device, facts, idle=lambda: run.active_loaders.idle, siblings=siblings
        )
        chain = Chain.apply(module, context)
        entry = PreparedModel(chain.wrapped, chain, facts, names)
        if model.recipe is not None and _replaces_parameters(plan):
            device = torch.device("cpu") if chain.parameters_on_host else run.device
            self._materialise(model.recipe, entry.module, device)
        if entry.wrapped is not entry.module or "forward" in vars(entry.module):
            watch(entry.wrapped, run.situation)
        run.prepared.models.append(entry)
        # A compiled block is compiled anew when hooks come and go. Along tp, cp and pp, generators are seeded inside.
        if plan.layout.size() == plan.layout.width > 1 and not plan.compile:
            watch_first_pass(entry.module, run.device, partial(self._note_draws, facts))
        if run.phases is not None:
            run.phases.follow_model(entry.wrapped)
            if chain.runner is not None:
                chain.runner.follow(run.events.phase)
            for applied in chain:
                applied.call_before_waiting(run.phases.reduce)
        if self._profiles is not None:
            self._profiles.follow(entry.module, facts.parameters)

    def _materialise(self, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        """Gives a model from the meta device its values: rank 0's seed, so the same on all ranks and under every plan."""
        seed = int(self.run.collectives.broadcast_object(torch.initial_seed()))
        recipe.run(model, device, seed)

    def _note_draws(self, facts: ModelFacts, names: list[str]) -> None:
        """Adds to the plan the modules that drew random numbers, and do not say so."""
        random_layers = dict(facts.random_layers)
        kinds = dict(facts.modules)
        others = [(name, kinds.get(name, "module")) for name in names if name not in random_layers]
        if others:
            decision = randomness.decision(facts.name, others, "seen in the first pass")
            self.run.note(decision)
            logger("plan").info("%s", decision)

    def _plan_beside(self, settings: Mapping[str, Any]) -> Plan:
        """The draft of another plan than the run's.

        Raises:
            PlanError: `plan-width`, where other ranks would read the same samples; and those of `draft`.
        """
        own = self.run.plan
        shared = {"mixed_precision": own.precision, "accumulate": own.accumulate, "recompute": own.recompute}
        notes = [Decision(name, value, "code", "prepare_model(plan=...)") for name, value in settings.items()]
        other = draft({**shared, **settings}, notes, self.run.world.size, own.options)
        for axes in (DATA_AXES, *((axis,) for axis in model_axes())):
            if other.layout.size(*axes) != own.layout.size(*axes):
                raise PlanError(
                    "plan-width",
                    f"one run cannot hold models under {own.layout} and under {other.layout}.",
                    why="a rank reads one share of each batch, for all models: "
                    f"{', '.join(model_axes())} and replicate x shard must agree",
                    fix=f"divide replicate x shard = {own.layout.width} otherwise, and leave the rest as it is",
                )
        return other

    def evaluation_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Moves a model and lets it compute in the run's precision; nothing communicates."""
        if place:
            model.to(self.run.device)
        self.run.precision.wrap_forward(model, self.run.device)
        return model

    # -- optimizers, loaders, schedulers -----------------------------------------------------------------------------

    def optimizer(self, optimizer: Optimizer, names: Names) -> PreparedOptimizer:
        """Prepares one optimizer of models that are prepared by now.

        Args:
            names: of the parameters that it was built with.
        """
        prepared = self.run.prepared
        prepared_already = prepared.optimizer_of(optimizer)
        if prepared_already is not None:
            return prepared_already
        tied = None
        if any(strategy.removes_parameters for strategy in strategies_of(self.run.plan)):
            tied = [model.facts.tied for model in prepared.models]
        rebind(optimizer, names, [model.module for model in prepared.models], tied)
        for model in prepared.models:
            if model.is_stepped_by(optimizer):
                for decision in model.chain.bind(optimizer):
                    self.run.note(decision)
        step_local_parts(optimizer)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(self.run.device)
        if runtime.current().chooses_kernels:
            fused = choose_fused(optimizer, any(model.facts.sparse for model in prepared.models))
            if fused is not None:
                self.run.note(fused)
        return self.record_optimizer(optimizer)

    def record_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Takes in an optimizer that holds the prepared parameters."""
        run = self.run
        entry = PreparedOptimizer(optimizer, run.gradients, run.scaler, run.optimizer_step, run.admits)
        run.prepared.optimizers.append(entry)
        run.prepared.may_step(optimizer)
        return entry

    def loader(self, loader: DataLoader[Any], *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Prepares one loader, with its own choices over those that all share. Ranks: all; the first agrees on the seed.

        Args:
            chosen: keywords of `prepare_loader`.

        Raises:
            PlanError: `plan-open`. DataError: those of `prepare_loader`.
        """
        run = self.run
        prepared_loader = self.known_loader(loader)
        if prepared_loader is not None:
            return prepared_loader
        self.check_width()
        if self._seed is None:
            # Rank 0's, also where a script has seeded its ranks differently: one shuffled order is divided over them.
            seed = run.settings.data_seed
            if seed is None:
                seed = torch.initial_seed()
            self._seed = int(run.collectives.broadcast_object(seed))
        options = {
            "tail": "pad" if run.settings.even_batches else "divide",
            "dispatch": run.settings.dispatch_batches,
            **chosen,
        }
        prepared = prepare_loader(
            loader,
            width=run.plan.layout.width,
            index=run.plan.layout.data_index(run.world.rank),
            device=run.device if place else torch.device("cpu"),
            seed=self._seed,
            accumulate=run.plan.accumulate,
            split_batches=run.settings.split_batches,
            collectives=run.data_ranks,
            active=run.active_loaders,
            non_blocking=run.settings.non_blocking,
            **options,
        )
        return self.record_loader(loader, prepared)

    def known_loader(self, loader: object) -> PreparedLoader | None:
        """The prepared loader, where this is one or was prepared before."""
        if isinstance(loader, PreparedLoader):
            return loader
        for prepared_loader in self.run.prepared.loaders:
            if getattr(prepared_loader, "original", None) is loader:
                return prepared_loader
        return None

    def check_width(self) -> None:
        """Raises PlanError `plan-open` where it is not known yet how many ranks read different samples."""
        # Whatever is chosen for `shard`, `replicate` and `zero`, these ranks together read different samples.
        open_axes = [axis for axis in model_axes() if axis in self.run.plan.open]
        if open_axes:
            raise PlanError(
                "plan-open",
                "a loader was prepared before the model whose size decides how many ranks share its samples.",
                why=f"{', '.join(open_axes)} stand on auto",
                fix="prepare them together: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`",
            )

    def record_loader(self, loader: DataLoader[Any], prepared: PreparedLoader) -> PreparedLoader:
        """Records what became of a loader."""
        run = self.run
        run.prepared.loaders.append(prepared)
        if hasattr(getattr(loader, "dataset", None), "__len__"):
            self._epoch_lengths.append((len(loader), len(prepared)))
        return prepared

    def scheduler(self, scheduler: Scheduler) -> PreparedScheduler:
        """Prepares one scheduler; its optimizer should be prepared already."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        run = self.run
        compare_lengths(scheduler, self._epoch_lengths, run.gradients.steps, run.plan.layout.width)
        prepared = PreparedScheduler(scheduler, run.prepared.optimizers_scheduled_by(scheduler), run.gradients)
        run.prepared.schedulers.append(prepared)
        return prepared

    def clear(self) -> None:
        """Forgets everything that was prepared, and gives the device's cached memory back."""
        self.run.prepared.clear()
        self._epoch_lengths.clear()
        if self.run.device.type != "cpu":
            torch.accelerator.empty_cache()


def _move(module: nn.Module, device: torch.device, tied: Sequence[Sequence[str]]) -> None:
    """Moves a model to a device. Parameters that have several names stay one parameter.

    On some devices, such as XLA's, `Module.to` puts a new parameter under each name.
    """
    module.to(device)
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)


def _replaces_parameters(plan: Plan) -> bool:
    """Whether the chain puts other parameters, of which a rank holds a part, in the place of the model's."""
    return any(strategy.replaces_parameters for strategy in strategies_of(plan))


_PREPARED = (
    "it prepares torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader and learning-rate schedulers"
)


def _refused(value: object) -> PrepareError:
    """The error `prepare-kind` for an object that is no model, optimizer, loader or scheduler."""
    what = f"`prepare` was given a {type(value).__name__}, which is no model, optimizer, loader or scheduler."
    why = _PREPARED
    fix = "leave it out of the call; it needs no preparation"
    if isinstance(value, type):
        what = f"`prepare` was given the class {value.__name__} and no object of it."
        fix = f"make the object first: `{value.__name__.lower()} = {value.__name__}(...)`, and prepare that"
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes) and _holds_objects(value):
        what = f"`prepare` was given one {type(value).__name__} of objects."
        why = "it takes the objects as arguments of their own, and returns them in the same order"
        star = "*objects.values()" if isinstance(value, Mapping) else "*objects"
        fix = f"write `prepare({star})`, or name them: `prepare(model, optimizer, loader)`"
    elif isinstance(value, Dataset):
        fix = "give it a loader: `DataLoader(dataset, batch_size=32)`"
    return PrepareError("prepare-kind", what, why=why, fix=fix)


def _holds_objects(value: Mapping[Any, Any] | Sequence[Any]) -> bool:
    """Whether a container was meant as the arguments of `prepare`: it holds a model, an optimizer or a loader."""
    items = value.values() if isinstance(value, Mapping) else value
    return any(isinstance(item, nn.Module | Optimizer) or hasattr(item, "dataset") for item in items)


def _checked_placement(placement: object, count: int) -> list[bool]:
    """`device_placement` as a list of one entry for each object.

    Raises:
        PrepareError: `prepare-placement`, where it is no list, or one of another length.
    """
    if isinstance(placement, Sequence) and not isinstance(placement, str) and len(placement) == count:
        return list(placement)
    given = f"{len(placement)} entries" if isinstance(placement, list | tuple) else repr(placement)
    raise PrepareError(
        "prepare-placement",
        f"device_placement does not say for each of {count} objects whether it is moved.",
        why=f"it is {given}",
        fix=f"write device_placement={[True] * count}, with False for what stays where it is; or leave it out",
    )
