"""`Steps`: backward passes, under every plan.

backward           scale by the window -> scale by the loss scaler -> autograd -> settle at the end of a window
forward_backward   the same after the model and the loss; where a pipeline runs, it does all of this itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from paceline.base.errors import PlanError
from paceline.data.active import ActiveLoaders
from paceline.data.unprepared import UnpreparedLoaders
from paceline.optim.accumulate import Accumulation
from paceline.parallel.microbatches import Microbatches, Part
from paceline.preparation import Preparation
from paceline.world import hangs
from paceline.world.collectives import Collectives


class Steps:
    """Runs backward passes of what was prepared.

    Args:
        prepared: the models and their chains.
        gradients: the owner of gradient scale.
        scaler: the loss scaler or None.
        active: the loaders being iterated, which learn here that they train.
        collectives: of all ranks.
        debug: checks before communication that all ranks came here.

    Attributes:
        unprepared: warns of loaders that were never prepared; None where scripts divide samples themselves.
    """

    def __init__(
        self,
        prepared: Preparation,
        gradients: Accumulation,
        scaler: Any,
        active: ActiveLoaders,
        collectives: Collectives,
        debug: bool,
    ) -> None:
        self._prepared, self._gradients, self._scaler, self._active = prepared, gradients, scaler, active
        self._collectives, self._debug = collectives, debug
        self.unprepared: UnpreparedLoaders | None = UnpreparedLoaders(collectives.world)

    def backward(self, loss: torch.Tensor, num_items: int | torch.Tensor | None, **named: Any) -> None:
        """See `Accelerator.backward`."""
        if any(each.chain.runner is not None for each in self._prepared.models):
            raise PlanError(
                "backward-pipeline",
                "a pipeline runs forward and backward of its stages together, so there is no loss to call backward on.",
                why=f"pp={self._prepared.plan.layout.pp}",
                fix="use `accelerator.forward_backward(model, batch, loss_fn)`, which works under every plan",
            )
        self._back(self.scaled(self._gradients.checked(loss, named), num_items), **named)
        with self._prepared.exhausted("backward"):
            self.settle()

    def forward_backward(
        self, model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], num_items: int | None
    ) -> torch.Tensor:
        """See `Accelerator.forward_backward`."""
        parts = [Part.of(each) for each in batch] if isinstance(batch, Microbatches) else None
        whole = Part.of(batch) if parts is None else None
        prepared = self._prepared.find(model)
        runner = prepared.chain.runner if prepared is not None else None
        if whole is not None and runner is None:
            with self._prepared.exhausted("forward"):
                loss = loss_fn(model(*whole.inputs, **whole.named), whole.target)
            self.backward(loss, num_items)
            return loss.detach()
        # The scale is linear in the loss: what 1 becomes is the factor of each micro-batch's loss.
        factor = self.scaled(torch.ones((), device=self._prepared.device), num_items)
        mean = num_items is None
        if prepared is None or runner is None:
            return self._one_by_one(model, parts or (), loss_fn, factor, mean)
        with self._prepared.exhausted("forward"), self._prepared.phase("pipeline"), prepared.chain.hold_gradients():
            if whole is not None:
                loss = runner.forward_backward(whole, loss_fn, factor, mean)
            else:
                loss = runner.forward_backward_each(parts or (), loss_fn, factor, mean)
        if self._scaler is not None:
            self._scaler.watch(loss)
        self.settle()
        return loss

    def _one_by_one(
        self, model: nn.Module, parts: Sequence[Part], loss_fn: Callable[..., torch.Tensor], factor: Any, mean: bool
    ) -> torch.Tensor:
        """Micro-batches of one step where no pipeline runs: ranks communicate in the last one's backward pass."""
        total, share = torch.zeros((), device=self._prepared.device), factor / (len(parts) if mean else 1)
        for number, part in enumerate(parts, 1):
            with self._prepared.hold_gradients([model]) if number < len(parts) else nullcontext():
                with self._prepared.exhausted("forward"):
                    loss = loss_fn(model(*part.inputs, **part.named), part.target)
                self._back(self._gradients.checked(loss, {}) * share)
            total += loss.detach()
        self.settle()
        return total / len(parts) if mean else total

    def _back(self, loss: torch.Tensor, **named: Any) -> None:
        with self._prepared.exhausted("backward"), self._prepared.phase("backward", loss):
            try:
                loss.backward(**named)
            except BaseException as error:
                hangs.backward_failed(error)
                for each in self._prepared.models:
                    each.chain.backward_failed()
                raise
            hangs.backward_passed()

    def scaled(self, loss: torch.Tensor, num_items: int | torch.Tensor | None = None) -> torch.Tensor:
        """The loss as autograd should see it; who calls `backward` on it calls `settle` after."""
        loss = self._gradients.scale(loss, num_items)
        self._active.train()
        if self.unprepared is not None and self._active.top is None and self._prepared.plan.layout.width > 1:
            self.unprepared.look(self._prepared.loaders)
        if self._debug and self._gradients.sync:
            self._collectives.check("backward")
        if self._scaler is not None:
            if self._gradients.first:
                self._scaler.refresh()
            loss = self._scaler.scale(loss)
        return loss

    def settle(self) -> None:
        """Finishes the window's gradients, where it ends here. Ranks: all."""
        if self._gradients.sync:
            with self._prepared.phase("reduce"):
                for each in self._prepared.models:
                    each.chain.finish_reduction()
