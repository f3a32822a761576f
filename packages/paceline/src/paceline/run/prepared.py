"""`Prepared`: the record of the objects that one run prepared, and questions about them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.checkpoint.state.module_state import clean
from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, Scheduler
from paceline.parallel.chain import Chain
from paceline.parallel.strategy import AppliedStrategy
from paceline.plan.facts import ModelFacts
from paceline.precision.policy import unwrap_forward
from paceline.torch_internals.modules import compiled_original
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import whole

if TYPE_CHECKING:
    from paceline.optim.clip import Across


@dataclass(eq=False)
class PreparedModel:
    """One prepared model.

    Attributes:
        wrapped: the model that the training loop calls.
        chain: the strategies that were applied to it.
        facts: what planning knew of the model.
        names: the keys of the whole model's `state_dict`, in order; a rank of a pipeline holds only some of them.
        given: the parameters that it had before `prepare`, with their names; an optimizer that is prepared later may hold
            them. The references are weak: where no optimizer does, their memory is free.
        is_trained_here: False if another run trains the model, so that optimizers of that run may step it.
    """

    wrapped: nn.Module
    chain: Chain
    facts: ModelFacts
    names: tuple[str, ...]
    given: tuple[tuple[weakref.ref[Tensor], str], ...] = ()
    is_trained_here: bool = True

    @property
    def module(self) -> nn.Module:
        """The module that the user wrote."""
        return self.chain.module

    @property
    def tied(self) -> dict[str, str]:
        """The further names of tied parameters, each with the first name."""
        return self.facts.aliases

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer holds any parameter of the model."""
        stepped = set(map(id, parameters_of(optimizer)))
        # In the middle of a pass whole parameters may stand in the model.
        own = self.chain.shards_of(self.module.parameters())
        return not stepped.isdisjoint(map(id, own))

    def given_parameters(self) -> Iterator[tuple[Tensor, str]]:
        """Yields the parameters from before `prepare` that something still holds, each with its name."""
        for reference, name in self.given:
            parameter = reference()
            if parameter is not None:
                yield parameter, name


class EntryOfModel:
    """Refers from a model to its entry, which outlives `free_memory` as long as the model does: strategies have changed it.

    A copy of the model, and a pickled model, refer to nothing: the entry belongs to the original.
    """

    def __init__(self, entry: PreparedModel | None = None) -> None:
        self.entry = entry

    @classmethod
    def of(cls, model: nn.Module) -> PreparedModel | None:
        """Returns the entry of a model that a run has prepared and forgotten; None for any other model."""
        reference: EntryOfModel = vars(model).get("_paceline_entry", cls())
        return reference.entry

    def __reduce__(self) -> tuple[type[EntryOfModel], tuple[()]]:
        return EntryOfModel, ()


class Prepared:
    """The objects that one run prepared, in the order in which they were prepared."""

    def __init__(self) -> None:
        self.models: list[PreparedModel] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        # Optimizers that may step. The references are weak: an optimizer of other parameters than the prepared ones is put
        # here too, and it should live no longer than the script keeps it.
        self._steppable: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    # -- look up -------------------------------------------------------------------------------------------------

    def find(self, model: nn.Module, *, wrapped_only: bool = False) -> PreparedModel | None:
        """Returns the entry of a model, or None.

        Args:
            model: what `prepare` returned, compiled since or not; or, unless `wrapped_only`, what was passed to `prepare`.
        """
        for entry in self.models:
            if entry.wrapped is model or (not wrapped_only and entry.module is model):
                return entry
        original = compiled_original(model)
        if original is None or wrapped_only:
            return None
        return self.find(original)

    def optimizer_of(self, optimizer: Optimizer) -> PreparedOptimizer | None:
        """Returns the entry of an optimizer that was passed to `prepare`, or None."""
        for entry in self.optimizers:
            if entry.optimizer is optimizer:
                return entry
        return None

    def check_known(self, value: PreparedOptimizer | PreparedScheduler) -> None:
        """Checks that a prepared object is one of this run.

        Raises:
            PrepareError: `prepare-forgotten`, if another run has prepared it, or this one before `free_memory`.
        """
        if any(value is entry for entry in (*self.optimizers, *self.schedulers)):
            return
        kind = "optimizer" if isinstance(value, PreparedOptimizer) else "scheduler"
        raise PrepareError(
            "prepare-forgotten",
            f"`prepare` was given a prepared {kind} that this accelerator does not know.",
            why="`free_memory` makes an accelerator forget what it has prepared; or another accelerator has prepared it",
            fix=f"prepare your own objects again: the model, and `{kind}.{kind}`",
        )

    def optimizers_scheduled_by(self, scheduler: Scheduler) -> list[PreparedOptimizer]:
        """Returns the prepared optimizers for which a scheduler was built; all of them if it was built for none."""
        own = getattr(scheduler, "optimizer", None)
        scheduled = [entry for entry in self.optimizers if own is entry or own is entry.optimizer]
        return scheduled or self.optimizers

    def parameters(self, models: Iterable[int] | None = None) -> list[Tensor]:
        """Returns the parameters of this rank, each once, in one order on all ranks.

        Args:
            models: the numbers of the models; None for all, and for parameters that only optimizers hold.
        """
        chosen = self.models if models is None else [self.models[number] for number in models]
        groups: list[Iterable[Tensor]] = [model.chain.shards_of(model.module.parameters()) for model in chosen]
        if models is None:
            groups += map(parameters_of, self.optimizers)
        by_id: dict[int, Tensor] = {}
        for parameters in groups:
            for parameter in parameters:
                by_id[id(parameter)] = parameter
        return list(by_id.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of the models with the names that they have in the user's modules."""
        for model in self.models:
            for name, parameter in model.module.named_parameters():
                yield clean(name), parameter

    def names_of(self, model: nn.Module) -> tuple[Sequence[str], Mapping[str, str]]:
        """Returns all names of a model's state in order, and its tied names; () and {} if the model was not prepared."""
        entry = self.find(model)
        return ((), {}) if entry is None else (entry.names, entry.tied)

    def unwrap(self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True) -> nn.Module:
        """Returns the module that the user wrote, with or without its mixed-precision forward and `torch.compile`."""
        entry = self.find(model)
        inner = model if entry is None else entry.module
        if not keep_compile:
            inner = compiled_original(inner) or inner
        if not keep_precision:
            unwrap_forward(inner)
        return inner

    # -- gradients and parameters ----------------------------------------------------------------------------------

    def held_gradients(self, models: Iterable[int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each trained parameter of this rank with each of its gradients: the one in `.grad`, and those that strategies
        hold.

        Args:
            models: see `parameters`.
        """
        for parameter in self.parameters(models):
            if parameter.grad is not None:
                yield parameter, parameter.grad
        chosen = self.models if models is None else [self.models[number] for number in models]
        for model in chosen:
            for applied in model.chain.strategies:
                yield from applied.held_gradients()

    def all_evaluate(self) -> bool:
        """Returns whether there are models, and all of them are in evaluation mode."""
        return bool(self.models) and not any(entry.wrapped.training for entry in self.models)

    def took_part(self, changed: set[Tensor]) -> set[Tensor]:
        """Returns the parameters that took part in the last backward pass, if the gradients of `changed` were changed by it."""
        for applied in self.applied_strategies():
            changed = applied.took_part(changed)
        return changed

    def numbers_of(self, models: Sequence[nn.Module]) -> frozenset[int] | None:
        """Returns the numbers of these models; None for none and for all models.

        Raises:
            PrepareError: `model-unprepared`.
        """
        numbers: set[int] = set()
        for model in models:
            entry = self.find(model)
            if entry is None:
                raise _unprepared(model, "a window belongs to models that `prepare` returned")
            numbers.add(self.models.index(entry))
        return frozenset(numbers) if 0 < len(numbers) < len(self.models) else None

    def hold_gradients(self, models: Sequence[nn.Module], alone: bool = False) -> AbstractContextManager[object]:
        """While it is open, backward passes of `models` (all if none is given) do not communicate; see `Reducer.holding`."""
        stack = ExitStack()
        for model in models or [entry.wrapped for entry in self.models]:
            entry = self.find(model)
            if entry is None:
                raise _unprepared(model, "gradients are held back by the strategies that `prepare` applied")
            stack.enter_context(entry.chain.hold_gradients(alone))
        return stack

    def finish_reduction(self, waiting: Collection[int] = ()) -> None:
        """Finishes the reduction of the gradients of all models. Ranks: all.

        Args:
            waiting: numbers of models that are left out, as their gradients wait for further micro-batches.
        """
        for number, entry in enumerate(self.models):
            if number in waiting:
                continue
            for applied in entry.chain.strategies:
                applied.finish_reduction()

    def across(self) -> Across | None:
        """Returns the ranks that hold other stages of the models, which a norm of all gradients needs; None without stages."""
        owners = [entry.chain.owners for entry in self.models if entry.chain.owners is not None]
        if not owners:
            return None
        elsewhere: set[int] = set()
        for applied in self.applied_strategies():
            elsewhere |= applied.owned_elsewhere()
        from paceline.optim.clip import Across  # a pipeline alone has stages

        return Across(owners[0], elsewhere)

    def applied_strategies(self) -> list[AppliedStrategy]:
        """Returns the strategies that were applied to all models so far."""
        applied: list[AppliedStrategy] = []
        for entry in self.models:
            applied += entry.chain.strategies
        return applied

    def full_parameters(self, model: nn.Module, writeback: bool) -> AbstractContextManager[object]:
        """While it is open, the model's parameters are unsharded plain tensors. Ranks: all."""
        entry = self.find(model)
        if entry is None:
            raise _unprepared(model, "only what was prepared is divided")
        return entry.chain.full_parameters(writeback)

    def state_dict(self, model: nn.Module, module: nn.Module) -> dict[str, Any]:
        """Returns the full state dict of `module` under the user's names.

        Args:
            model: the prepared model.
            module: the user's module inside of it.

        Ranks: all; each gets it.
        """
        # A tied weight is gathered once, and stays one tensor under all its names.
        first_names: dict[int, str] = {}
        first_name_of: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first_name_of[name] = first_names.setdefault(id(parameter), name)
        gathered: dict[str, Any] = {}
        for name, value in module.state_dict().items():
            first_name = first_name_of.get(name, name)
            gathered[name] = gathered[first_name] if first_name in gathered else whole(value)
        state = {clean(name): value for name, value in gathered.items()}
        entry = self.find(model)
        for applied in entry.chain.strategies if entry is not None else ():
            state = applied.gather_state(state)
        return state

    # -- optimizers that were not prepared ---------------------------------------------------------------------------

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer holds parameters of a prepared model."""
        return any(model.is_stepped_by(optimizer) for model in self.models)

    def may_step(self, optimizer: Optimizer) -> None:
        """Allows an optimizer to step: it was prepared, or needs no preparation."""
        self._steppable.add(optimizer)

    def refuse_unprepared(self, optimizer: Optimizer) -> None:
        """Refuses the step of an optimizer that holds parameters of a prepared model, but was not prepared itself.

        Raises:
            PrepareError: `optimizer-unprepared`.
            TrainError: `optimizer-inner`.
        """
        if optimizer in self._steppable:
            return
        for entry in self.optimizers:
            if optimizer in entry.stepped_through:
                entry.step_through(optimizer)
                return
        if not any(model.is_trained_here and model.is_stepped_by(optimizer) for model in self.models):
            self._steppable.add(optimizer)
            return
        raise PrepareError(
            "optimizer-unprepared",
            f"{type(optimizer).__name__} steps a prepared model, but was not prepared itself.",
            why="it would step inside accumulation windows, on scaled or uncorrected gradients",
            fix="use what `prepare` returns: `model, optimizer = accelerator.prepare(model, optimizer)`",
        )

    def clear(self) -> None:
        """Forgets all objects. A model that strategies have changed can be prepared again as it is."""
        for entry in self.models:
            if any(True for _ in entry.chain.strategies):
                vars(entry.module)["_paceline_entry"] = EntryOfModel(entry)
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._steppable.clear()


def _unprepared(model: nn.Module, why: str) -> PrepareError:
    return PrepareError(
        "model-unprepared",
        f"{type(model).__name__} was not prepared.",
        why=why,
        fix="pass the model that `prepare` returned",
    )
