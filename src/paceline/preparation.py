"""`Preparation`: takes the user's objects through the plan and keeps what came out.

facts(model) -> resolve (rules + every strategy.check; ONE error with all problems)
  -> names of parameters -> device, precision, chain -> rebind optimizers -> loaders -> schedulers
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.base.errors import PlanError, PrepareError, Problem
from paceline.base.log import logger, warn_once
from paceline.checkpoint.state.module_state import clean
from paceline.data.active import ActiveLoaders
from paceline.data.loader import PreparedLoader
from paceline.data.prepare import prepare_loader
from paceline.data.seed import follow
from paceline.observe.profiles import Profiles
from paceline.optim.accumulate import Accumulation
from paceline.optim.clip import Across
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.rebind import choose_fused, parameter_names, rebind, shared_parameters, started_optimizers
from paceline.optim.schedule import PreparedScheduler, compare_lengths, is_scheduler
from paceline.parallel.chain import Chain
from paceline.parallel.draws import watch_first_pass
from paceline.parallel.materialise import Recipe
from paceline.parallel.strategy import STRATEGIES, AppliedStrategy, Context, strategies_of
from paceline.plan import randomness
from paceline.plan.facts import ModelFacts, model_facts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner import fit
from paceline.planner.estimate import division_of
from paceline.planner.exhausted import explain_exhaustion, watch
from paceline.precision.policy import Precision, unwrap_forward, wrap_forward
from paceline.preparation_errors import checked_placement, refused
from paceline.world import runtime
from paceline.world.collectives import Collectives
from paceline.world.layout import DATA_AXES
from paceline.world.mesh import Mesh
from paceline.world.sharded import whole


@dataclass(eq=False)
class PreparedModel:
    """One model: what the chain made of it, and the chain, which can take it off again.

    Attributes:
        names: of all that its `state_dict` held before, in order: a rank of a pipeline holds some of them alone.
    """

    wrapped: nn.Module
    chain: Chain
    facts: ModelFacts
    names: tuple[str, ...]

    @property
    def module(self) -> nn.Module:
        """The module that the user wrote."""
        return self.chain.module

    @property
    def tied(self) -> dict[str, str]:
        """The other names of tied parameters -> the first."""
        return {other: names[0] for names in self.facts.tied for other in names[1:]}


class Preparation:
    """What one `Accelerator` prepared.

    Args:
        plan: the draft; `plan` becomes the resolved one.
        collectives, device: with whom and where.
        precision: row of the precision table.
        accumulation: the owner of gradient scale.
        scaler: the loss scaler or None.
        active: the stack of loaders being iterated.
        loader_options: keywords of `prepare_loader` that all loaders share.

    Attributes:
        at_first_step: called once, before the first step of an optimizer.
        profiles: what measures the run, or None.
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        device: torch.device,
        precision: Precision,
        accumulation: Accumulation,
        scaler: Any,
        active: ActiveLoaders,
        loader_options: dict[str, Any],
    ) -> None:
        self.plan = plan
        self.models: list[PreparedModel] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.device = device
        self.at_first_step: Callable[[], None] | None = None
        self.profiles: Profiles | None = None
        self._collectives = collectives
        self._precision, self._accumulation, self._scaler, self._active = precision, accumulation, scaler, active
        self._loader_options = loader_options
        self._runtime = runtime.current()
        self._seed: int | None = None
        self._lengths: list[tuple[int, int]] = []  # batches in an epoch before and after
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.lay_out()
        _guard()
        _alive.add(self)

    # -- prepare ---------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placement: Sequence[bool] | None = None) -> list[Any]:
        """Prepares objects of any kind in any order; see `Accelerator.prepare`."""
        kinds = [self._kind(each) for each in objects]
        places = [True] * len(objects) if placement is None else checked_placement(placement, len(objects))
        result = list(objects)
        models = [(at, each) for at, (each, kind) in enumerate(zip(objects, kinds, strict=True)) if kind == "model"]
        optimizers = [each for each, kind in zip(objects, kinds, strict=True) if kind == "optimizer"]
        before = self._prepare_models(models, places, result, optimizers)
        for at, kind in enumerate(kinds):
            if kind == "loader":
                result[at] = self.loader(objects[at], place=places[at])
        for at, kind in enumerate(kinds):
            if kind == "optimizer":
                result[at] = self._optimizer(objects[at], before)
        for at, kind in enumerate(kinds):
            if kind == "scheduler":
                result[at] = self.scheduler(objects[at])
        return result

    def _kind(self, value: Any) -> str:
        if value is None or isinstance(value, (PreparedOptimizer, PreparedScheduler)):
            return "done"
        if isinstance(value, nn.Module):
            return "done" if self.find(value, wrapped_only=True) else "model"
        if isinstance(value, Optimizer):
            return "optimizer"
        if is_scheduler(value):
            return "scheduler"
        if hasattr(value, "__iter__") and not isinstance(value, (str, bytes, dict, list, tuple, torch.Tensor)):
            return "loader"
        raise refused(value)

    def _prepare_models(
        self, models: list[tuple[int, Any]], places: list[bool], result: list[Any], optimizers: list[Optimizer]
    ) -> dict[int, tuple[int, str]]:
        self._runtime.preparing(self, [model for _, model in models])
        new = [(at, model) for at, model in models if self.find(model) is None]
        for at, model in models:
            known = self.find(model)
            if known is not None:
                result[at] = known.wrapped
        facts = [model_facts(model) for _, model in new]
        # Names are taken before anything is touched: strategies may replace every parameter.
        before = parameter_names([each.module for each in self.models] + [model for _, model in new])
        own = [each.optimizer for each in self.optimizers]
        found = shared_parameters(list(dict.fromkeys([*own, *optimizers])), before)
        if any(strategy.replaces_parameters for strategy in strategies_of(self.plan)):
            replaced = {id(parameter) for _, model in new for parameter in model.parameters()}
            found += started_optimizers([each for each in optimizers if each not in own], replaced)
        recipes = [Recipe(model) if fact.meta else None for (_, model), fact in zip(new, facts, strict=True)]
        for (at, _), fact, recipe in zip(new, facts, recipes, strict=True):
            found += self._misplaced(fact, places[at])
            found += recipe.missing(fact.name) if recipe is not None else []
        if found and not new:
            raise PlanError.of(found)
        if new and self.plan.open:
            self._choose(facts)
        plan = resolve(self._draft(), facts, STRATEGIES, found) if new else self.plan
        replaced_parameters = any(strategy.replaces_parameters for strategy in strategies_of(plan))
        for (at, model), fact, recipe in zip(new, facts, recipes, strict=True):
            if places[at]:
                move = lambda tensor: tensor if tensor.is_meta else tensor.to(self.device)  # noqa: E731
                model._apply(move) if fact.meta else model.to(self.device)
            if recipe is not None and not replaced_parameters:
                self._materialise(recipe, model, self.device)
            wrap_forward(model, self._precision, self.device)
            whole_names = tuple(map(clean, model.state_dict(keep_vars=True)))
            context = Context(
                plan, self.mesh, self._collectives, self.device, fact,
                idle=lambda: self._active.idle, siblings=self._applied,
            )  # fmt: skip
            chain = Chain.apply(model, context)
            prepared = PreparedModel(chain.wrapped, chain, fact, whole_names)
            if recipe is not None and replaced_parameters:
                host = torch.device("cpu")
                self._materialise(recipe, prepared.module, host if chain.parameters_on_host else self.device)
            if prepared.wrapped is not prepared.module or "forward" in vars(prepared.module):
                watch(prepared.wrapped, self._situation)
            self.models.append(prepared)
            # A compiled block is compiled anew when hooks come and go. Along tp, cp and pp, generators are seeded inside.
            if plan.layout.size() == plan.layout.width > 1 and not plan.compile:
                watch_first_pass(prepared.module, self.device, partial(self._note_draws, fact))
            if self.profiles is not None:
                self.profiles.follow(prepared.wrapped, prepared.module, fact.parameters, chain.runner)
            result[at] = prepared.wrapped
        if new:
            self.plan = plan
            logger("plan").info("%s", plan.explain())
            for line in filter(None, (division_of(plan, fact) for fact in facts)):
                warn_once("plan", line)
        self._runtime.prepared(self)
        return before

    def _note_draws(self, facts: ModelFacts, names: list[str]) -> None:
        """Adds to the plan the modules that drew random numbers, and do not say so."""
        said = dict(facts.random_layers)
        kinds = dict(facts.modules)
        others = [(name, kinds.get(name, "module")) for name in names if name not in said]
        if others:
            noted = randomness.decision(facts.name, others, "seen in the first pass")
            self._note(noted)
            logger("plan").info("%s", noted)

    def _applied(self) -> Iterator[AppliedStrategy]:
        """What strategies did to all models."""
        for each in self.models:
            yield from each.chain

    def _materialise(self, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        """Gives a model from the meta device its values: rank 0's seed, so the same on all ranks and under every plan."""
        seed = int(self._collectives.broadcast_object(torch.initial_seed()))
        recipe.run(model, device, seed)

    def _misplaced(self, facts: ModelFacts, moved: bool) -> list[Problem]:
        """What is wrong with where a model is, on several ranks, each of which has one device."""
        here = str(self.device)
        if self._collectives.size == 1 or not facts.devices or (len(facts.devices) == 1 and moved):
            return []
        if len(facts.devices) > 1:
            what, fix = (
                f"{facts.name} lies on several devices.",
                f"move it to one before `prepare`: `model.to({here!r})`",
            )
        elif torch.device(facts.devices[0]) != self.device:
            what, fix = (
                f"{facts.name} is not on this rank's device.",
                "leave `device_placement` out, and it is moved there",
            )
        else:
            return []
        why = f"its tensors are on {', '.join(facts.devices)}; this rank computes on {here}"
        return [Problem("model-device", what, why=why, fix=fix)]

    def _choose(self, facts: Sequence[ModelFacts]) -> None:
        """Says what the plan left open, and lays the ranks out anew. Ranks: all."""
        world = self._collectives.world
        memory = self._collectives.broadcast_object(self._runtime.memory(self.device, world.local_size))
        self.plan = fit.fit(self.plan, facts, world, memory)
        self.lay_out()

    def lay_out(self) -> None:
        """Makes the groups of the plan; peers along tp, cp and pp read the same samples. Ranks: all."""
        world = self._collectives.world
        self.mesh = Mesh(self.plan.layout, world, self.device.type)
        follow(self.plan.layout)
        self.data = self._collectives.over(self.mesh.data_group)
        self._accumulation.over(self.plan.layout.width, self.data)
        self._loader_options["collectives"] = self.data
        if self._scaler is not None:
            self._scaler.agree = any(strategy.divides_steps for strategy in strategies_of(self.plan))
            self._scaler.named = self.named_parameters

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters of the prepared models, by the names that the user knows."""
        for each in self.models:
            yield from ((clean(name), parameter) for name, parameter in each.module.named_parameters())

    def _draft(self) -> Plan:
        """The plan without what an earlier `prepare` derived from its models."""
        kept = tuple(decision for decision in self.plan.decisions if decision.field != "strategies")
        return replace(self.plan, strategies=(), decisions=kept)

    def _optimizer(self, optimizer: Optimizer, before: dict[int, tuple[int, str]]) -> PreparedOptimizer:
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        removed = any(strategy.removes_parameters for strategy in strategies_of(self.plan))
        tied = [each.facts.tied for each in self.models] if removed else None
        rebind(optimizer, before, [each.module for each in self.models], tied)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for each in self.models:
            if any(id(parameter) in own for parameter in each.module.parameters()):
                for made in each.chain.bind(optimizer):
                    self._note(made)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.to(self.device)
        if self._runtime.chooses_kernels:
            decision = choose_fused(optimizer, any(each.facts.sparse for each in self.models))
            if decision is not None:
                self._note(decision)
        prepared = PreparedOptimizer(optimizer, self._accumulation, self._scaler, self._stepping)
        self.optimizers.append(prepared)
        self._known.add(optimizer)
        return prepared

    def _note(self, decision: Decision) -> None:
        if decision not in self.plan.decisions:
            self.plan = replace(self.plan, decisions=(*self.plan.decisions, decision))

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Prepares one optimizer of models that were prepared before."""
        return self.prepare([optimizer])[0]

    def loader(self, loader: Any, *, place: bool = True, **chosen: Any) -> PreparedLoader:
        """Prepares one loader, with its own choices over those that all share. Ranks: all; the first agrees on the seed."""
        if isinstance(loader, PreparedLoader):
            return loader
        for known in self.loaders:
            if getattr(known, "original", None) is loader:
                return known
        if self.plan.open:
            raise PlanError(
                "plan-open",
                "a loader was prepared before the model whose size decides how many ranks share its samples.",
                why=f"{', '.join(self.plan.open)} stand on auto",
                fix="prepare them together: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`",
            )
        if self._seed is None:
            told = self._loader_options.get("seed")
            seed = torch.initial_seed() if told is None else told
            self._seed = int(self._collectives.broadcast_object(seed))
        options = {**self._loader_options, "seed": self._seed, **chosen}
        prepared = prepare_loader(
            loader,
            width=self.plan.layout.width,
            index=self.plan.layout.data_index(self._collectives.world.rank),
            device=self.device if place else torch.device("cpu"),
            accumulate=self.plan.accumulate,
            active=self._active,
            **options,
        )
        self.loaders.append(prepared)
        if hasattr(getattr(loader, "dataset", None), "__len__"):
            self._lengths.append((len(loader), len(prepared)))
        return prepared

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one scheduler; its optimizer should be prepared already."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        optimizers = [each for each in self.optimizers if own is each or own is each.optimizer]
        layout, steps = self.plan.layout, self._accumulation.steps
        compare_lengths(scheduler, [a for a, _ in self._lengths], [b for _, b in self._lengths], steps, layout.width)
        prepared = PreparedScheduler(scheduler, optimizers or self.optimizers, self._accumulation)
        self.schedulers.append(prepared)
        return prepared

    def evaluation_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Moves a model and lets it compute in the run's precision; nothing communicates."""
        if place:
            model.to(self.device)
        wrap_forward(model, self._precision, self.device)
        return model

    def _stepping(self) -> AbstractContextManager[None]:
        """What each step of an optimizer runs inside of."""
        if self.at_first_step is not None:
            first, self.at_first_step = self.at_first_step, None
            first()
        return self.exhausted("step") if self.profiles is None else self._measured_step()

    @contextmanager
    def _measured_step(self) -> Iterator[None]:
        with self.exhausted("step"), self.phase("step"):
            yield

    def phase(self, name: str, loss: torch.Tensor | None = None) -> AbstractContextManager[Any]:
        """While it is open, what runs counts as a phase of the step; see `observe.phases`. Nothing where nobody measures.

        Args:
            loss: the one whose backward pass runs inside.
        """
        if self.profiles is None:
            return _UNMEASURED
        if loss is not None:
            self.profiles.phases.follow_loss(loss)
        return self.profiles.phases.during(name)

    def exhausted(self, where: str) -> AbstractContextManager[None]:
        """While it is open, memory that does not suffice is told with what the plan needs."""
        return explain_exhaustion(self._situation, where)

    def _situation(self) -> tuple[Plan, tuple[ModelFacts, ...], int, int]:
        world = self._collectives.world
        return self.plan, tuple(each.facts for each in self.models), world.size, world.local_size

    # -- look up ---------------------------------------------------------------------------------------------

    def find(self, model: Any, *, wrapped_only: bool = False) -> PreparedModel | None:
        """The entry of a model, given as it came out of `prepare`, compiled since, or (unless `wrapped_only`) as it went in."""
        for each in self.models:
            if each.wrapped is model or (not wrapped_only and each.module is model):
                return each
        inside = getattr(model, "_modules", {}).get("_orig_mod")
        return self.find(inside) if inside is not None and not wrapped_only else None

    def hold_gradients(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """While it is open, backward passes of `models` (all, where none is named) do not communicate."""
        stack = ExitStack()
        for model in models or [each.wrapped for each in self.models]:
            prepared = self.find(model)
            if prepared is None:
                raise _unprepared(model, "gradients are held back by the strategies that `prepare` applied")
            stack.enter_context(prepared.chain.hold_gradients())
        return stack

    def across(self) -> Across | None:
        """The ranks that hold the other stages of the models, for norms of all their gradients; None without any."""
        owners = [each.chain.owners for each in self.models if each.chain.owners is not None]
        elsewhere = {key for each in self.models for key in each.chain.owned_elsewhere()}
        return Across(owners[0], elsewhere) if owners else None

    def unwrap(self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True) -> nn.Module:
        """The module that the user wrote, with or without its mixed-precision forward and `torch.compile`."""
        prepared = self.find(model)
        inner = prepared.module if prepared is not None else model
        if not keep_compile and hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        if not keep_precision:
            unwrap_forward(inner)
        return inner

    def state_dict(self, model: nn.Module, module: nn.Module) -> dict[str, Any]:
        """The whole state of `module` under the names that the user gave, whatever was done to `model`, which holds it.

        Ranks: all; all get it.
        """
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
        gathered: dict[str, Any] = {}  # a tied weight once, as in the module
        for name, value in module.state_dict().items():
            alias = tied.get(name, name)
            gathered[name] = gathered[alias] if alias in gathered else whole(value)
        state = {clean(name): value for name, value in gathered.items()}
        prepared = self.find(model)
        return state if prepared is None else prepared.chain.gather_state(state)

    def full_parameters(self, model: nn.Module, writeback: bool) -> AbstractContextManager[Any]:
        """While it is open, parameters are whole plain tensors. Ranks: all."""
        prepared = self.find(model)
        if prepared is None:
            raise _unprepared(model, "only what was prepared is divided")
        return prepared.chain.full_parameters(writeback)

    @contextmanager
    def under(self, plan: Mapping[str, Any] | None) -> Iterator[None]:
        """While it is open, models are prepared under `plan` instead of the run's.

        Raises:
            PlanError: `plan-width`, where other ranks would read the same samples; and those of `draft`.
        """
        if plan is None:
            yield
            return
        run, mesh = self.plan, self.mesh
        told = {"mixed_precision": run.precision, "accumulate": run.accumulate, "recompute": run.recompute, **plan}
        notes = [Decision(name, value, "code", "prepare_model(plan=...)") for name, value in plan.items()]
        other = draft(told, notes, self._collectives.world.size, run.options)
        if [other.layout.size(*axes) for axes in (DATA_AXES, ("pp",), ("tp",), ("cp",))] != [
            run.layout.size(*axes) for axes in (DATA_AXES, ("pp",), ("tp",), ("cp",))
        ]:
            raise PlanError(
                "plan-width",
                f"one run cannot hold models under {run.layout} and under {other.layout}.",
                why="a rank reads one share of each batch, for all models: pp, tp, cp and replicate x shard must agree",
                fix=f"divide replicate x shard = {run.layout.width} otherwise, and leave the rest as it is",
            )
        self.plan, self.mesh = other, Mesh(other.layout, mesh.world, mesh.device_type)
        try:
            yield
        finally:
            self.plan, self.mesh = run, mesh

    def _refuse_unprepared(self, optimizer: Optimizer) -> None:
        own = {id(parameter) for each in self.models for parameter in each.module.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._known.add(optimizer)
            return
        raise PrepareError(
            "optimizer-unprepared",
            f"{type(optimizer).__name__} steps a prepared model, but was not prepared itself.",
            why="it would step inside accumulation windows, on scaled or uncorrected gradients",
            fix="use what `prepare` returns: `model, optimizer = accelerator.prepare(model, optimizer)`",
        )

    def clear(self) -> None:
        """Forgets everything that was prepared, and gives the device's cached memory back."""
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self._lengths):
            kept.clear()  # type: ignore[attr-defined]
        self._known = weakref.WeakSet()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


_UNMEASURED = nullcontext()
_alive: weakref.WeakSet[Preparation] = weakref.WeakSet()


@cache
def _guard() -> None:
    """One hook for good: taking hooks away when a run is collected would change torch's list while a step reads it."""

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in _alive:
            if optimizer not in each._known:
                each._refuse_unprepared(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _unprepared(model: nn.Module, why: str) -> PrepareError:
    return PrepareError(
        "model-unprepared",
        f"{type(model).__name__} was not prepared.",
        why=why,
        fix="pass the model that `prepare` returned",
    )
