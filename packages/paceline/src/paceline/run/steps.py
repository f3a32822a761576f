"""`Steps`: the backward passes of a run and the clipping of gradients, under every plan.

backward           scale to the window's mean -> multiply by the loss scale -> autograd -> reduce at the end of a window
forward_backward   the same after the model's forward and the loss; a pipeline runs all of it itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import PlanError
from paceline.base.log import warn_once
from paceline.parallel.microbatches import BatchPart, Microbatches
from paceline.run.run import Run, is_in_loop_of_another
from paceline.world.tree import first_rows

if TYPE_CHECKING:
    from paceline.data.unprepared import UnpreparedLoaders
    from paceline.parallel.strategy import AppliedStrategy
    from paceline.run.replicas import Replicas


_NOTHING = nullcontext()
_LOOKS = 3  # backward passes at the beginning that look whether another `Accelerator` has prepared the loader


class Steps:
    """Runs the backward passes of prepared models, and clips their gradients.

    Args:
        run: the run of the models. Loaders that are being iterated during a backward pass are marked as loaders that train.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prepared = run.prepared
        self._gradients = run.gradients
        self._unprepared: UnpreparedLoaders | None = None
        semantics = run.plan.semantics
        self._looks_left = _LOOKS if semantics.unprepared_loaders == "warned" else 0
        # Both look for what only several ranks can do wrong.
        if run.world.size > 1 and semantics.unprepared_loaders == "warned":
            from paceline.data.unprepared import UnpreparedLoaders

            self._unprepared = UnpreparedLoaders(run.world)
        if run.world.size > 1 and semantics.ungathered_metrics == "warned":
            from paceline.data.unreduced import UnreducedMetrics

            self._unreduced = UnreducedMetrics(run.world, run.events, self._prepared.all_evaluate)
        self._replicas: Replicas | None = None  # no other rank answers
        if run.world.size > 1 and run.runtime.others_answer:
            from paceline.run.replicas import Replicas

            self._replicas = Replicas(run)
        self._norm = torch.zeros((), device=run.device)

    def backward(self, loss: torch.Tensor, num_items: float | torch.Tensor | None, **keywords: object) -> None:
        """See `Accelerator.backward`."""
        for entry in self._prepared.models:
            if entry.chain.runner is not None:
                raise PlanError(
                    "backward-pipeline",
                    "a pipeline runs forward and backward of its stages together, so there is no loss to call backward on.",
                    why=f"pp={self._run.plan.layout.pp}",
                    fix="use `accelerator.forward_backward(model, batch, loss_fn)`, which works under every plan",
                )
        # The keywords, such as `retain_graph`, are those of `Tensor.backward`.
        checked_loss = self._gradients.checked(loss, keywords)
        try:
            self._run_backward(self.scaled(checked_loss, num_items), keywords)
        except BaseException as error:
            self._run.explain_exhaustion("backward", error)
            raise
        self.finish_reduction()

    def forward_backward(
        self, model: nn.Module, batch: object, loss_fn: Callable[..., torch.Tensor], num_items: float | None
    ) -> torch.Tensor:
        """See `Accelerator.forward_backward`."""
        parts: list[BatchPart] | None = None
        if isinstance(batch, Microbatches):
            parts = list(map(BatchPart.of, batch))
        entry = self._prepared.find(model)
        runner = None if entry is None else entry.chain.runner
        # Without micro-batches and without a pipeline this is an ordinary forward and backward pass.
        if parts is None and runner is None:
            loss = self._forward(model, BatchPart.of(batch), loss_fn)
            self.backward(loss, num_items)
            return loss.detach()
        # Scaling is linear in the loss. So the loss 1 is scaled once, and its result is the factor of each micro-batch's loss.
        # As exact as the model: a third in float32 is another third in float64.
        is_double = entry is not None and "float64" in entry.facts.dtypes
        one = torch.ones((), device=self._run.device, dtype=torch.float64 if is_double else torch.float32)
        self._run.active_loaders.stand_for(one, batch)
        share = self._scaled_to_window(one, num_items)
        scaler = self._run.scaler
        factor = share if scaler is None else scaler.scale(share)
        mean = num_items is None

        def seen_loss(output: object, target: object) -> torch.Tensor:
            loss = loss_fn(output, target)
            self._gradients.loss_weights.look_inside(loss, first_rows((output, target)))
            return loss

        if entry is None or runner is None:
            return self._run_each(model, parts or (), seen_loss, share, factor, mean)
        # No strategy communicates within the schedule: its micro-batches reach the ranks at different times.
        without_communication = entry.chain.hold_gradients()
        phase = self._run.events.phase["pipeline"]
        try:
            with phase, without_communication:
                if parts is None:
                    loss = runner.forward_backward(BatchPart.of(batch), seen_loss, factor, mean)
                else:
                    loss = runner.forward_backward_each(parts, seen_loss, factor, mean)
        except BaseException as error:
            self._announce_failure(error)
            self._run.explain_exhaustion("forward", error)
            raise
        self._run.collectives.backward_passed()
        if scaler is not None:
            scaler.watch(loss)
        self._run.events.backward(loss, loss * share, num_items)
        self.finish_reduction()
        return loss

    def _run_each(
        self,
        model: nn.Module,
        parts: Sequence[BatchPart],
        loss_fn: Callable[..., torch.Tensor],
        share: torch.Tensor,
        factor: torch.Tensor,
        mean: bool,
    ) -> torch.Tensor:
        """Runs the micro-batches of one step without a pipeline; gradients are reduced in the last one's backward pass."""
        total = torch.zeros((), device=self._run.device, dtype=share.dtype)
        divisor = len(parts) if mean else 1
        for number, part in enumerate(parts, 1):
            # Gradients add up on each rank. Only the backward pass of the last micro-batch reduces them.
            context: AbstractContextManager[object] = nullcontext()
            if number < len(parts):
                context = self._prepared.hold_gradients([model])
            with context:
                loss = self._forward(model, part, loss_fn)
                self._run.events.backward(loss, loss * share / divisor, None)
                self._run_backward(self._gradients.checked(loss, {}) * (factor / divisor), {})
            total += loss.detach()
        self.finish_reduction()
        return total / divisor

    def _forward(self, model: nn.Module, part: BatchPart, loss_fn: Callable[..., torch.Tensor]) -> torch.Tensor:
        try:
            return loss_fn(model(*part.inputs, **part.named), part.target)
        except BaseException as error:
            self._run.explain_exhaustion("forward", error)
            raise

    def _run_backward(self, loss: torch.Tensor, keywords: Mapping[str, object]) -> None:
        models = self._prepared.models
        waiting = self._gradients.waiting_models
        # Models whose own windows go on communicate nothing, whichever parameters of theirs the pass reaches.
        held: AbstractContextManager[object] = _NOTHING
        if waiting:
            held = self._prepared.hold_gradients([models[number].wrapped for number in waiting])
        finished: list[AppliedStrategy] = []  # by `finish_reduction`, which follows
        for number, entry in enumerate(models):
            if number not in waiting and entry.chain.strategies and self._gradients.sync:
                finished += entry.chain.strategies
        with self._run.events.phase["backward"], held:
            try:
                for applied in finished:
                    applied.leave_to_finish(True)
                loss.backward(**keywords)
            except BaseException as error:
                self._announce_failure(error)
                self._run.explain_exhaustion("backward", error)
                raise
            finally:
                for applied in finished:
                    applied.leave_to_finish(False)
        self._run.collectives.backward_passed()

    def _announce_failure(self, error: BaseException) -> None:
        """Tells the other ranks of the error, and resets what the pass has left unfinished."""
        self._run.collectives.backward_failed(error)
        for applied in self._prepared.applied_strategies():
            applied.backward_failed()

    def scaled(self, loss: torch.Tensor, num_items: float | torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss on which to call `backward`; the caller must call `finish_reduction` afterwards."""
        share = self._scaled_to_window(loss, num_items)
        self._run.events.backward(loss, share, num_items)
        scaler = self._run.scaler
        return share if scaler is None else scaler.scale(share)

    def _scaled_to_window(self, loss: torch.Tensor, num_items: float | torch.Tensor | None) -> torch.Tensor:
        """Returns the loss as a part of the window's mean over all ranks."""
        if self._run.scaler is not None:
            # First of all: a gradient that is written after the look would seem to take part in the pass.
            self._run.scaler.begin_pass()
        loss = self._gradients.scale(loss, num_items)
        loaders = self._run.active_loaders
        loaders.train()
        # Outside of all loops over prepared loaders, the script may have forgotten to prepare its loader.
        if self._unprepared is not None and loaders.top is None and self._run.plan.layout.width > 1:
            self._unprepared.look(self._prepared.loaders)
        if self._looks_left:
            self._looks_left -= 1
            if loaders.top is None:
                self._tell_of_another()
        if self._run.settings.debug and self._gradients.sync:
            self._run.collectives.check("backward")
        return loss

    def _tell_of_another(self) -> None:
        """Warns if the loop is over a loader that another `Accelerator` has prepared."""
        if not is_in_loop_of_another(self._run):
            return
        warn_once(
            "data",
            "`backward` was called in a loop over a loader that another Accelerator has prepared. This one does not know how "
            "many samples each process has of a batch, nor where an epoch ends: uneven batches do not count as on one process, "
            "and a window (gradient_accumulation_steps) stays open at the end of the loader. Prepare the loader and all models "
            "with one Accelerator: it takes several models and optimizers.",
        )

    # -- gradients that are complete -----------------------------------------------------------------------------

    def unscale(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """See `Accelerator.unscale_gradients`."""
        if optimizer is None:
            # Parameters that no optimizer steps have gradients, too.
            self._finish(self._gradients.ended(self._prepared.parameters()))
            return
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        for prepared in self._prepared.optimizers:
            if prepared in chosen:
                prepared.unscale()

    def _finish(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Makes gradients final: those of the window's mean, without the loss scale. Ranks: all.

        Returns:
            Whether they are: inside of a window they are not, and are left as they are.
        """
        if not self._gradients.ends(parameters):
            return False
        self._gradients.settle(parameters)
        if self._run.scaler is not None:
            self._run.scaler.unscale(parameters, [prepared.optimizer for prepared in self._prepared.optimizers])
        return True

    def clip_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """See `Accelerator.clip_grad_norm_`."""
        from paceline.optim.clip import clip_grad_norm  # many loops do not clip

        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with self._run.events.phase["clip"]:
            if self._finish(chosen):
                across = self._prepared.across()
                self._norm = clip_grad_norm(chosen, max_norm, norm_type, across, error_if_nonfinite)
                self._run.events.clipped(self._norm)
        return self._norm

    def clip_value(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """See `Accelerator.clip_grad_value_`."""
        from paceline.optim.clip import clip_grad_value  # many loops do not clip

        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with self._run.events.phase["clip"]:
            if self._finish(chosen):
                clip_grad_value(chosen, clip_value)

    @contextmanager
    def uneven(self, joinables: Sequence[object]) -> Iterator[None]:
        """See `Accelerator.join_uneven_inputs`."""
        from torch.distributed.algorithms.join import Join

        self._run.events.uneven_steps()
        entries = [self._prepared.find(model) for model in joinables if isinstance(model, nn.Module)]
        strategies = [applied for entry in entries if entry is not None for applied in entry.chain.strategies]
        wrapped = [applied.joinable for applied in strategies if applied.joinable is not None]
        with ExitStack() as stack:
            for applied in self._prepared.applied_strategies():
                stack.enter_context(applied.uneven_steps())
            if wrapped and self._run.world.size > 1:
                stack.enter_context(Join(wrapped))
            if self._replicas is not None:
                stack.enter_context(self._replicas.uneven())
            yield

    def compare_ranks(self) -> None:
        """Raises an error if ranks that should train the same model have come apart. Ranks: all.

        Raises:
            TrainError: `replicas-differ`, on every rank.
        """
        if self._replicas is not None:
            self._replicas.compare()

    def finish_reduction(self) -> None:
        """Ends a backward pass, and finishes the reduction of gradients if it was the last of its window. Ranks: all."""
        if not self._gradients.passed():
            return
        try:
            with self._run.events.phase["reduce"]:
                self._prepared.finish_reduction(self._gradients.waiting_models)
        except BaseException as error:
            self._run.explain_exhaustion("backward", error)
            raise
        if self._run.scaler is not None:
            self._run.scaler.pass_ended()
        if self._replicas is not None:
            self._replicas.passed()
        elif self._run.world.size == 1:
            # The micro-batches of a window are compared. In a rehearsal of several ranks losses have no values.
            self._gradients.loss_weights.judge_own()
