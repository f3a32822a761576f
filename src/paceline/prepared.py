"""`Prepared`: the record of what `prepare` took in, and what can be asked of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.checkpoint.state.module_state import clean
from paceline.data.loader import PreparedLoader
from paceline.optim.clip import Across
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.schedule import PreparedScheduler, Scheduler
from paceline.parallel.chain import Chain
from paceline.plan.facts import ModelFacts
from paceline.precision.policy import unwrap_forward
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import whole


@dataclass(eq=False)
class PreparedModel:
    """One model: what the chain made of it, and the chain, which can take it off again.

    Attributes:
        wrapped: the model as the loop calls it.
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
        return self.facts.aliases

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds some of the model's parameters."""
        stepped = set(map(id, parameters_of(optimizer)))
        return not stepped.isdisjoint(map(id, self.module.parameters()))


class Prepared:
    """What one run prepared, in the order in which it was prepared."""

    def __init__(self) -> None:
        self.models: list[PreparedModel] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        # Weak: an optimizer of the script's own, which steps nothing of ours, is the script's to keep.
        self._steppable: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    # -- look up -------------------------------------------------------------------------------------------------

    def find(self, model: nn.Module, *, wrapped_only: bool = False) -> PreparedModel | None:
        """The entry of a model, given as it came out of `prepare`, compiled since, or (unless `wrapped_only`) as it went in."""
        for entry in self.models:
            if entry.wrapped is model or (not wrapped_only and entry.module is model):
                return entry
        compiled = getattr(model, "_modules", {}).get("_orig_mod")
        if compiled is None or wrapped_only:
            return None
        return self.find(compiled)

    def optimizer_of(self, optimizer: Optimizer) -> PreparedOptimizer | None:
        """The entry of an optimizer as it went in."""
        for entry in self.optimizers:
            if entry.optimizer is optimizer:
                return entry
        return None

    def optimizers_scheduled_by(self, scheduler: Scheduler) -> list[PreparedOptimizer]:
        """The prepared optimizers that a scheduler was built for; all, where it was built for none of them."""
        own = getattr(scheduler, "optimizer", None)
        scheduled = [entry for entry in self.optimizers if own is entry or own is entry.optimizer]
        return scheduled or self.optimizers

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the models, by the names that the user knows."""
        for model in self.models:
            for name, parameter in model.module.named_parameters():
                yield clean(name), parameter

    def unwrap(self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True) -> nn.Module:
        """The module that the user wrote, with or without its mixed-precision forward and `torch.compile`."""
        entry = self.find(model)
        inner = model if entry is None else entry.module
        if not keep_compile and hasattr(inner, "_orig_mod"):
            inner = cast(nn.Module, inner._orig_mod)
        if not keep_precision:
            unwrap_forward(inner)
        return inner

    # -- gradients and parameters ----------------------------------------------------------------------------------

    def hold_gradients(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """While it is open, backward passes of `models` (all, where none is named) do not communicate."""
        stack = ExitStack()
        for model in models or [entry.wrapped for entry in self.models]:
            entry = self.find(model)
            if entry is None:
                raise _unprepared(model, "gradients are held back by the strategies that `prepare` applied")
            stack.enter_context(entry.chain.hold_gradients())
        return stack

    def across(self) -> Across | None:
        """The ranks that hold the other stages of the models, for norms of all their gradients; None without any."""
        owners = [entry.chain.owners for entry in self.models if entry.chain.owners is not None]
        if not owners:
            return None
        elsewhere: set[int] = set()
        for entry in self.models:
            elsewhere |= entry.chain.owned_elsewhere()
        return Across(owners[0], elsewhere)

    def full_parameters(self, model: nn.Module, writeback: bool) -> AbstractContextManager[object]:
        """While it is open, parameters are whole plain tensors. Ranks: all."""
        entry = self.find(model)
        if entry is None:
            raise _unprepared(model, "only what was prepared is divided")
        return entry.chain.full_parameters(writeback)

    def state_dict(self, model: nn.Module, module: nn.Module) -> dict[str, Any]:
        """The whole state of `module` under the names that the user gave, whatever was done to `model`, which holds it.

        Ranks: all; all get it.
        """
        first_names: dict[int, str] = {}
        gathered_as: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gathered_as[name] = first_names.setdefault(id(parameter), name)
        gathered: dict[str, Any] = {}  # a tied weight once, as in the module
        for name, value in module.state_dict().items():
            first_name = gathered_as.get(name, name)
            gathered[name] = gathered[first_name] if first_name in gathered else whole(value)
        state = {clean(name): value for name, value in gathered.items()}
        entry = self.find(model)
        return state if entry is None else entry.chain.gather_state(state)

    # -- optimizers that were not prepared ---------------------------------------------------------------------------

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of a prepared model."""
        return any(model.is_stepped_by(optimizer) for model in self.models)

    def may_step(self, optimizer: Optimizer) -> None:
        """An optimizer that was prepared, or that a script may step without that."""
        self._steppable.add(optimizer)

    def refuse_unprepared(self, optimizer: Optimizer) -> None:
        """Refuses the step of an optimizer that holds parameters of a prepared model, but was not prepared itself.

        Raises:
            PrepareError: `optimizer-unprepared`.
        """
        if optimizer in self._steppable:
            return
        if not self.is_stepped_by(optimizer):
            self._steppable.add(optimizer)
            return
        raise PrepareError(
            "optimizer-unprepared",
            f"{type(optimizer).__name__} steps a prepared model, but was not prepared itself.",
            why="it would step inside accumulation windows, on scaled or uncorrected gradients",
            fix="use what `prepare` returns: `model, optimizer = accelerator.prepare(model, optimizer)`",
        )

    def clear(self) -> None:
        """Forgets everything."""
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
