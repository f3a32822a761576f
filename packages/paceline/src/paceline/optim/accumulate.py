"""`Accumulation`: the ONE owner of gradient scale. It scales losses such that the gradient of a step is that of a mean.

    backward(loss)      which mean is the loss a part of?     over the samples of the loader whose batch it was computed from,
                                                              over items, or over micro-batches: see `window.Mean`
      scale             loss / divisor                        the gradients of a window add up to that of the mean
      autograd, reduction
      passed            which parameters took part
    clip, step          `settle`                              only where the last micro-batch had no backward pass of a mean
    zero_grad           `keeps`                               gradients that wait for the rest of their window stay

Strategies average gradients over the ranks that read different samples (`width` of them), so the divisors are

    samples         N / (n * width)     N = samples of the whole window over all ranks, n = of this micro-batch on this rank
    items           N / width           N = items of the whole window over all ranks; the loss is a sum
    micro-batches   steps

N is known before the first backward pass if the loader knows its batches, and outside of `accumulate` always: there the ranks
add up what each has before the pass. In a window of several micro-batches N may show only in the last one (an iterable data
set, tokens, a batch that the script leaves out). Until then an estimate takes its place. Before the last backward pass the
ranks add up what they had, gradients so far are multiplied by what the estimate was wrong by, and the last pass is scaled
exactly. So gradients are final as soon as they are reduced, and no flag says whether they were corrected.

The estimate for items is a power of two: to divide by it does not round, so the result is the same for every estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from paceline.base.errors import PlanError, TrainError
from paceline.base.log import warn_once
from paceline.optim.changes import Gradients
from paceline.optim.loss_weights import LossWeights
from paceline.optim.mean import ITEMS, MICRO_BATCHES, SAMPLES, Mean, checked_count, mixed, power_of_two
from paceline.optim.window import Window, Windows
from paceline.plan.data import BatchInfo
from paceline.plan.semantics import NATIVE, Semantics
from paceline.torch_internals.tensors import multiply_in_place
from paceline.world.collectives import Collectives
from paceline.world.sharded import local

T = TypeVar("T")


class _Loader(Protocol):
    @property
    def current(self) -> BatchInfo | None: ...


class _GivenBatch(Protocol):
    @property
    def loader(self) -> object: ...

    @property
    def info(self) -> BatchInfo: ...

    @property
    def seen_rows(self) -> int | None: ...

    @property
    def may_drop(self) -> bool: ...

    def place(self) -> tuple[int, ...]: ...

    def window_rows(self, count: int) -> int | None: ...


class _ActiveLoaders(Protocol):
    @property
    def top(self) -> _Loader | None: ...

    @property
    def leading(self) -> _Loader | None: ...

    def ends_window(self, before: Any = None) -> bool: ...

    def source_of(self, loss: Tensor, *, is_whole_step: bool = False) -> _GivenBatch | None: ...


class _Held(Protocol):
    def __call__(self, models: Iterable[int] | None = None) -> Iterable[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Pass:
    """One backward pass.

    Attributes:
        number: the number of the pass in the run, from 1.
        mean: the mean of which its loss is a part; None under a script's own weights.
        divisor: what the mean's losses were divided by in this pass.
        factor: what this rank's loss was multiplied by.
        given: the loss that was given to `scale`, if it is a sum over items.
    """

    number: int
    mean: Mean | None = None
    divisor: float = 1.0
    factor: float = 1.0
    given: Tensor | None = None

    @property
    def correction(self) -> float:
        """The factor by which its loss must be multiplied now to be its part of the mean."""
        if self.mean is None:
            return 1.0
        return self.divisor / self.mean.divisor


@dataclass(eq=False)
class _MicroBatch(AbstractContextManager[None]):
    """It is open during a micro-batch; see `Accumulation.window`. A class, since generators cost each step more calls."""

    begin: Callable[[], Window]
    hold: Callable[[], AbstractContextManager[object]]
    failed: Callable[[BaseException], None]
    held: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        self.window = self.begin()
        if not self.window.sync:
            self.held = self.hold()
            self.held.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if self.held is not None:
                self.held.__exit__(kind, error, traceback)
        finally:
            self.window.leave()
        if error is not None:
            self.failed(error)


def _nothing_held(models: Iterable[int] | None = None) -> Iterable[tuple[Tensor, Tensor]]:
    return ()


class Accumulation:
    """Counts micro-batches and scales losses.

    Args:
        steps: the number of micro-batches in a window.
        width: the number of ranks whose gradients the strategies average.
        active: knows which loader is being iterated (`data.active.ActiveLoaders`).
        collectives: adds up over ranks what each of them has of a mean.
        held: returns the parameters, of all models or of those with these numbers, with each of their gradients: the one in
            `.grad`, and those that strategies hold.
        took_part: of the parameters whose gradients have changed, returns those that took part in the last backward pass.
        parameters: returns those of all models and optimizers, in one order on all ranks.
        finish_reduction: reduces gradients that were held back, but not of models with these numbers. Ranks: all.
        semantics: says which weight a loss has, and whether the end of an epoch ends a window.

    Attributes:
        steps: the number of micro-batches in a window.
        width: the number of ranks whose gradients the strategies average.
        weighs_by_samples: whether losses are weighted by the number of samples. If False, every micro-batch and rank has the
            same weight, and the script controls its window: outside of `window`, `sync` keeps the value that was set.
        sync_at_end: whether the end of a loader ends the window.
        began: whether any backward pass was scaled here.
        passes: the number of such backward passes.
        last_pass: the last of them.
        declared: whether the loop marks its micro-batches with `accumulate`.
        loss_weights: looks at the first losses.
        items: the number of items in all finished windows of this process, over all ranks, if losses are sums over items.
        replicas_equal: False while ranks take separate steps (LocalSGD), until their parameters are averaged.
        optimizers_equal: False from the first separate step on: averages leave the states of optimizers as they are.
    """

    def __init__(
        self,
        steps: int,
        width: int,
        active: _ActiveLoaders,
        collectives: Collectives,
        held: _Held = _nothing_held,
        took_part: Callable[[set[Tensor]], set[Tensor]] = lambda changed: changed,
        parameters: Callable[[], Iterable[Tensor]] = tuple,
        finish_reduction: Callable[[Collection[int]], None] = lambda waiting: None,
        semantics: Semantics = NATIVE,
    ) -> None:
        self.steps = steps
        self.width = width
        self.weighs_by_samples = semantics.loss_weights == "samples"
        self.sync_at_end = semantics.epoch_ends_window
        self.began = False
        self.passes = 0
        self.last_pass = Pass(0)
        self.declared = False
        self.replicas_equal = True
        self.optimizers_equal = True
        self.items = 0
        self.loss_weights = LossWeights()
        self._active = active
        self._collectives = collectives
        self._held = held
        self._took_part = took_part
        self._parameters = parameters
        self._finish_reduction = finish_reduction
        self._items_divisor: float | None = None  # the estimate for the next window whose losses are sums over items
        self.reset()

    def reset(self) -> None:
        """Forgets all windows, as the models to which they belong are forgotten."""
        self._windows = Windows(self.steps)
        self._mean: Mean | None = None  # of the backward pass that runs
        self._gradients_before: Gradients | None = None

    def over(self, width: int, collectives: Collectives) -> None:
        """Sets the ranks whose gradients are averaged, once the plan is resolved."""
        self.width = width
        self._collectives = collectives

    def set_steps(self, steps: int) -> None:
        """Sets the number of micro-batches in a window, from the next window on.

        Raises:
            PlanError: `plan-accumulate`.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PlanError(
                "plan-accumulate",
                f"{steps!r} micro-batches cannot make an optimizer step.",
                why=f"accelerator.gradient_accumulation_steps = {steps!r}; it is a whole number, 1 or more",
                fix="set gradient_accumulation_steps to 1 or more",
            )
        self.steps = steps

    def mark_replicas(self, *, equal: bool) -> None:
        """Records that ranks take separate steps from now on, or that their parameters are equal again."""
        self.replicas_equal = equal
        self.optimizers_equal &= equal

    # -- windows -------------------------------------------------------------------------------------------------

    def window(
        self,
        hold: Callable[[], AbstractContextManager[object]],
        done: int | None = None,
        models: frozenset[int] | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> AbstractContextManager[None]:
        """Returns a context that is open during one micro-batch.

        Args:
            hold: returns a context in which strategies do not communicate. It is entered unless this micro-batch is the last
                of its window.
            done: the number of finished micro-batches in the window, if the caller counts them; 0 begins a new window.
            models: the models to which the window belongs. Each set of models has windows of its own.
            failed: called with an error of the micro-batch; it may raise another one in its place.
        """
        return _MicroBatch(partial(self._begin, done, models), hold, failed)

    def _begin(self, done: int | None, models: frozenset[int] | None) -> Window:
        self.declared = True
        window = self._windows.of_models(models)
        if done is not None:
            window.continue_after(done)
        window.enter(self.steps, partial(self._is_last_batch, window))
        return window

    def _is_last_batch(self, window: Window) -> bool:
        """Returns whether the current batch ends its window in any case: the rest of it would belong to the next epoch."""
        if self.weighs_by_samples:
            return self._active.ends_window(window.source)
        return self.sync_at_end and self.batch is not None and self.batch.last

    @property
    def sync(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self._windows.current.sync

    @sync.setter
    def sync(self, value: bool) -> None:
        """Says it for a script that counts its micro-batches itself."""
        self._windows.current.declare(sync=value)

    @property
    def batch(self) -> Any:
        """The `BatchInfo` of the current batch; None if no prepared loader is being iterated."""
        loader = self._active.top
        return None if loader is None else loader.current

    @property
    def done(self) -> int:
        """The number of finished micro-batches in the current window; 0 between windows."""
        return 0 if self.sync else self._windows.current.done

    @property
    def is_between_windows(self) -> bool:
        """Whether no window has gradients that wait for further micro-batches."""
        return not any(window.holds_gradients for window in self._windows.all)

    @property
    def waiting_models(self) -> set[int]:
        """The numbers of models whose gradients wait in windows of their own: passes of other windows reduce none of them."""
        waiting: set[int] = set()
        for models, window in self._windows.by_models.items():
            if models is not None and window.holds_gradients:
                waiting |= models
        return waiting

    def ends(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether gradients of these parameters wait for no further micro-batch, so that they may be stepped."""
        ended = True
        for window in self._windows.of(parameters):
            ended &= window.sync
        return ended

    def ended(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the parameters whose gradients wait for no further micro-batch."""
        return [parameter for parameter in parameters if self.ends([parameter])]

    def kept(self, parameters: Iterable[Tensor]) -> set[Tensor]:
        """Returns parameters, these and others, whose gradients `zero_grad` must leave: they are parts of an open window."""
        # Of a script that calls `loss.backward()` itself, passes are not known.
        if not (self.weighs_by_samples and self.began):
            return set() if self.sync else set(parameters)
        kept: set[Tensor] = set()
        for window in self._windows.of(parameters):
            if window.keeps(parameters):
                kept |= window.members
        return kept

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Called where gradients were cleared: they are no parts of a mean any more."""
        for window in self._windows.all:
            if window.members or window.older:
                window.forget(set(parameters))

    # -- a backward pass -----------------------------------------------------------------------------------------

    @staticmethod
    def checked(loss: object, keywords: Mapping[str, object]) -> Tensor:
        """Returns the loss, if a backward pass can start from it; `keywords` are those of `Tensor.backward`.

        Raises:
            TrainError: `backward-loss`.
        """
        if not isinstance(loss, Tensor):
            why = f"it is a {type(loss).__name__}, which does not know how it was computed"
            fix = "pass the tensor that the loss function returned; use `.item()` or `float()` for printing only"
        elif not loss.requires_grad:
            why = "no parameter that requires a gradient took part in it, or it was computed under torch.no_grad()"
            fix = "compute the loss from the prepared model's output, with gradients on; unfreeze what should learn"
        elif loss.numel() != 1 and keywords.get("gradient") is None:
            why = f"it has the shape {tuple(loss.shape)}, and a gradient is that of one number"
            fix = "take its mean: `accelerator.backward(loss.mean())`"
        else:
            return loss
        raise TrainError("backward-loss", "the backward pass cannot start from this loss.", why=why, fix=fix)

    def scale(self, loss: Tensor, num_items: float | Tensor | None = None) -> Tensor:
        """Returns the loss from which the backward pass starts. The caller calls `passed` after the pass.

        Args:
            loss: the mean over the micro-batch's samples on this rank; with `num_items`, the sum over its items.
            num_items: the number of items (tokens) in `loss` on this rank, or the sum of their weights.

        Ranks: all. Those calls communicate that must add up over ranks what each has: with items, or if a `collate_fn` may
            drop samples, one small message in the last micro-batch of a window, and with items one in the first window.

        Raises:
            TrainError: `accumulate-outside`, `items-mixed`, `items-count`.
        """
        self.began = True
        self.passes += 1
        window = self._windows.current
        if not self.weighs_by_samples:
            self._mean = None
            share = self._share_of_idle_ranks()
            self.last_pass = Pass(self.passes, factor=share)
            if share != 1.0:
                loss = loss * share
            return loss if self.steps == 1 else loss / self.steps
        if not window.is_open:
            if self.steps > 1:
                raise TrainError(
                    "accumulate-outside",
                    f"backward was called outside `accumulate`, but a step is {self.steps} micro-batches.",
                    why=f"gradient_accumulation_steps={self.steps}: only `accumulate` knows which micro-batch this is",
                    fix="put the body of the loop in `with accelerator.accumulate(model):`",
                )
            window = self._windows.of_models(None)
            window.enter_alone()
        if window.micro_batch > 1 or not window.sync:
            self._look_before(window)
        source = self._active.source_of(loss, is_whole_step=window.steps == 1)
        order = window.note_loss(source)
        batch = None if source is None else source.info
        # A rank without a sample in the global batch has a filler row. The loss becomes zero, but the backward pass still runs:
        # the collectives of the other ranks need this rank.
        is_idle = batch is not None and batch.weights[batch.index] == 0
        self._look(loss, window, order, source, num_items)
        if num_items is not None:
            mean, part = self._items(window, 0.0 if is_idle else checked_count(num_items))
        elif source is not None and batch is not None:
            mean, part = self._samples(window, source, batch)
        else:
            mean, part = self._micro_batches(window)
        # A batch that the script leaves out makes an estimate of what was known, too.
        may_change = not mean.is_exact or not window.sync
        if may_change and not mean.parameters:
            self._keep_older(window)
        self._mean = mean
        factor = 0.0 if is_idle else part / mean.divisor
        given = loss.detach() if mean.kind == ITEMS else None
        self.last_pass = Pass(self.passes, mean, mean.divisor, factor, given)
        if factor == 0.0:
            return loss * 0.0
        # A factor of 1 is left out: it would cost a kernel and a node of the graph.
        divisor = mean.divisor / part
        if divisor == 1.0:
            return loss
        return loss / divisor

    def _look(
        self, loss: Tensor, window: Window, order: int, source: _GivenBatch | None, items: float | Tensor | None
    ) -> None:
        """Looks at how much each element of a loss counts, where this could be another number elsewhere."""
        # The losses of micro-batches come later.
        is_whole = loss.grad_fn is not None
        if self.width == 1 and is_whole and (items is not None or self.steps == 1):
            return
        if source is not None:
            batch = source.info
            rows = batch.real[batch.index]
            # A `collate_fn` of the script's own may drop samples, which no rank then counts.
            if source.may_drop and source.seen_rows is not None and rows:
                rows = source.seen_rows
        elif items is not None:
            rows = 1
        else:
            return
        place = self._windows.all.index(window)
        self.loss_weights.look(loss, self.passes, (place, window.number, order), rows, items, source, window.steps)

    def _share_of_idle_ranks(self) -> float:
        """Returns the weight of this rank's loss if some ranks have no sample: theirs is 0, the others share their weight."""
        batch = self.batch
        if batch is None or all(batch.weights):
            return 1.0
        if not batch.weights[batch.index]:
            return 0.0
        num_with_samples = sum(map(bool, batch.weights))
        return len(batch.weights) / num_with_samples

    def _samples(self, window: Window, given: _GivenBatch, batch: BatchInfo) -> tuple[Mean, float]:
        """Returns the mean over the samples of a loader, and what this rank has of it in this micro-batch."""
        rows_of_all = sum(batch.weights)
        own: float = batch.weights[batch.index]
        # A `collate_fn` of the script's own may drop samples, so that ranks know their own rows only. On one rank, too: a
        # window that was saved there may go on on several.
        is_local = given.may_drop
        if is_local and given.seen_rows is not None and own:
            own = given.seen_rows
        mean = window.mean(SAMPLES, given.loader)
        if mean is None:
            num_ahead = window.steps - window.micro_batch + 1
            planned = rows_of_all if num_ahead == 1 else given.window_rows(num_ahead)
            is_exact = planned is not None and not given.may_drop
            if planned is None:
                planned = rows_of_all if window.sync else rows_of_all * num_ahead
            mean = window.begin_mean(SAMPLES, given.loader, is_local=is_local)
            mean.expect(max(1, planned), self.width, is_exact=is_exact)
        # A micro-batch may have several losses, each with its own backward pass; its rows count once.
        is_first = mean.count(own if is_local else rows_of_all, window.micro_batch, once=True)
        is_as_planned = mean.is_exact and mean.counted == mean.expected  # nearly always
        if is_first and window.sync and not is_as_planned:
            self._replace_estimate(window, mean, window.has_passed)
        return mean, own

    def _items(self, window: Window, num_items: float) -> tuple[Mean, float]:
        """Returns the mean over the items of a loss, and the factor of the loss in it."""
        number = window.next_items_loss()
        mean = window.mean(ITEMS, number) or window.begin_mean(ITEMS, number, is_local=True)
        mean.count(num_items, window.micro_batch)
        if window.sync:
            self._replace_estimate(window, mean, window.has_passed)
        elif mean.expected == 0.0:
            mean.expect(self._estimate(window, num_items), 1, is_exact=False)
        return mean, 1.0

    def _estimate(self, window: Window, num_items: float) -> float:
        """Returns a power of two near the number of items of a window, so that gradients neither overflow nor underflow."""
        if self._items_divisor is None:
            # Only in the first window of a run: later ones take the number of items of the window before.
            (seen,) = self._collectives.sum_numbers([num_items])
            self._items_divisor = power_of_two(seen * window.steps)
        return self._items_divisor

    def _micro_batches(self, window: Window) -> tuple[Mean, float]:
        """Returns the mean over micro-batches, in which each has the same weight."""
        mean = window.mean(MICRO_BATCHES, None)
        if mean is None:
            mean = window.begin_mean(MICRO_BATCHES, None, is_local=False)
            mean.expect(window.steps - window.micro_batch + 1, 1, is_exact=True)
        if mean.count(1, window.micro_batch, once=True) and window.sync:
            self._replace_estimate(window, mean, window.has_passed)
        return mean, 1.0

    def _replace_estimate(self, window: Window, mean: Mean, is_reduced: bool) -> None:
        """Sets the divisor of a mean to that of the whole window, and multiplies its gradients so far accordingly.

        Args:
            window, mean: of which all passes but the one that begins have run.
            is_reduced: whether these gradients may be averaged already, by a pass of another mean.

        Ranks: all.

        Raises:
            TrainError: `items-mixed`, if these gradients have parts of another mean, too.
        """
        total = mean.counted
        if mean.is_local:
            (total,) = self._collectives.sum_numbers([mean.counted])
        if mean.kind == ITEMS:
            self.items += round(total)
            self._items_divisor = power_of_two(total)
        if total == 0:
            total = 1.0  # all losses are sums over nothing
        before = mean.divisor
        mean.expect(total, 1 if mean.kind == MICRO_BATCHES else self.width, is_exact=True)
        factor = before / mean.divisor
        if factor == 1.0:
            return
        chosen = mean.parameters
        if is_reduced and self.width > 1:
            # This rank has gradients of parameters, as of an expert, that only other ranks have used.
            candidates = list(self._parameters())
            num_used = self._collectives.sum_numbers([parameter in chosen for parameter in candidates])
            chosen = {parameter for parameter, number in zip(candidates, num_used, strict=True) if number}
        if not chosen:
            return
        for other in window.means:
            if other is not mean and not other.parameters.isdisjoint(mean.parameters):
                raise mixed(mean, other)
        # Gradients may share memory, as views of one buffer do not, but as one tensor in two places does.
        held = [(parameter, gradient) for parameter, gradient in self._held() if parameter in chosen]
        gradients = {id(gradient): gradient for _, gradient in held}
        if gradients:
            multiply_in_place(list(map(local, gradients.values())), factor)
        # Gradients that are older than the window are no parts of the mean.
        for place, older in window.older_in(held):
            place.add_(older, alpha=1 - factor)

    def _keep_older(self, window: Window) -> None:
        """Copies gradients from before the window, which nobody has cleared: they are no parts of a mean that is estimated."""
        waiting: set[Tensor] = set()
        for other in self._windows.all:
            if other is window or other.holds_gradients:
                waiting |= other.members
        held = [(parameter, gradient) for parameter, gradient in self._held() if parameter not in waiting]
        if any(bool(local(gradient).any()) for _, gradient in held):
            window.keep_older(held)

    # -- which parameters took part ------------------------------------------------------------------------------

    def _look_before(self, window: Window) -> None:
        """Looks at the gradients before a backward pass in a window of several micro-batches."""
        before = Gradients(self._held())
        cleared = {parameter for parameter in window.members if not before.has(parameter)}
        # They were cleared by `model.zero_grad()` or by hand.
        if cleared and any(not mean.parameters.isdisjoint(cleared) for mean in window.means):
            warn_once(
                "optim",
                f"gradients of an open window were cleared, not by a prepared optimizer: they hold "
                f"{window.done} of its {window.steps} micro-batches. The step takes the mean of those that follow. "
                "`optimizer.zero_grad()` keeps gradients of the window.",
            )
            window.forget(cleared)
        self._gradients_before = before

    def passed(self) -> bool:
        """Called after a backward pass, before its gradients are reduced. Returns whether its window ends.

        Raises:
            TrainError: `items-mixed`, if gradients have parts of two means that cannot both be exact.
        """
        window = self._windows.current
        mean = self._mean
        parameters: set[Tensor] = set()
        if self._gradients_before is not None:
            parameters = self._took_part(self._gradients_before.changed(self._held()))
            self._gradients_before = None
        window.passed(parameters, mean)
        self._mean = None
        self.loss_weights.passed(self.last_pass.factor)
        if mean is not None:
            for other in window.means:
                is_apart = other is mean or other.parameters.isdisjoint(mean.parameters)
                if not is_apart and not (mean.is_exact and other.is_exact):
                    raise mixed(mean, other)
        return window.sync

    def settle(self, parameters: Sequence[Tensor]) -> None:
        """Makes gradients final whose window has ended without a backward pass of their mean in the last micro-batch.

        Ranks: all.
        """
        for window in self._windows.all:
            if window.members:
                window.used(parameters)
            # In a window of one micro-batch every divisor is known before the pass.
            if window.steps == 1 or not window.sync:
                continue
            open_means = [mean for mean in window.means if not mean.is_exact]
            if not open_means:
                continue
            # Other means may have a pass before them in this micro-batch. A rank may have used no parameter of a mean.
            num_reached = [float(not mean.parameters.isdisjoint(parameters)) for mean in open_means]
            if self.width > 1:
                num_reached = self._collectives.sum_numbers(num_reached)
            if any(num_reached):
                self._finish_reduction(self.waiting_models)
            for mean, number in zip(open_means, num_reached, strict=True):
                if number:
                    self._replace_estimate(window, mean, is_reduced=True)

    def over_ranks(self, loss: T, passes_before: int) -> T:
        """Returns the loss of a closure such that the gradients are its gradients: the mean over all ranks, with their weights.

        Args:
            loss: what the closure has returned on this rank; anything that is no number stays as it is.
            passes_before: the number of backward passes before the closure was called.

        Ranks: all; each gets the same number.

        Raises:
            TrainError: `optimizer-closure`, if the loss is a sum over items, and the closure has returned another number.
        """
        if not isinstance(loss, (Tensor, float, int)):
            return loss
        factor = self._factor_of_closure(loss, passes_before)
        if self.width == 1 and factor == 1.0:
            return loss
        # The loss of filler rows may be NaN, and 0 times NaN is NaN.
        if isinstance(loss, Tensor):
            weighted = loss.detach() * factor if factor else torch.zeros_like(loss)
            if self.width == 1:
                return cast(T, weighted)
            return cast(T, self._collectives.reduce(weighted, "sum", 1 / self.width))
        # A number that differs between ranks would make each take another step.
        own = float(loss) * factor if factor else 0.0
        (total,) = self._collectives.sum_numbers([own])
        return cast(T, total / self.width)

    def _factor_of_closure(self, loss: Tensor | float, passes_before: int) -> float:
        """Returns the factor of this rank's loss, of which the mean over ranks is the loss of the step."""
        if self.passes == passes_before:
            # The closure has computed no gradients.
            return self._share_of_batch() * self.width
        given = self.last_pass.given
        if given is None:
            return self.last_pass.factor
        returned = float(torch.as_tensor(loss).detach())
        if returned != float(given) or self.passes > passes_before + 1:
            raise TrainError(
                "optimizer-closure",
                "the loss of a closure cannot be told from what it returns.",
                why="it calls `backward(loss, num_items=n)`, whose gradients are those of a mean over all items, and returns "
                "another number than this loss",
                fix="return the loss that was passed to `accelerator.backward`, and call it once",
            )
        return self.last_pass.factor

    def _share_of_batch(self) -> float:
        """Returns this rank's share of the samples of the current batch."""
        loader = self._active.leading
        if loader is None or loader.current is None or not self.weighs_by_samples:
            return 1 / self.width
        weights = loader.current.weights
        return weights[loader.current.index] / sum(weights)

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    def window_state(self) -> dict[str, Any]:
        """Returns the state of the windows. It is the same on all ranks, except for `counts`, which are this rank's."""
        counts = [window.counts() for window in self._windows.all]
        sync = all(window.sync for window in self._windows.all)
        shared = {"sync": sync, "began": self.began, "divisor": self._items_divisor}
        return {**shared, "windows": self._windows.state(), "counts": counts}

    def older(self) -> list[Tensor]:
        """Returns the copies of gradients from before the windows, divided as those are."""
        return [entry.copy for window in self._windows.all for entries in window.older.values() for entry in entries]

    def older_gradients(self) -> dict[Tensor, list[Tensor]]:
        """Returns, by parameter, copies of gradients from before the open windows, which wait to be told from theirs."""
        older: dict[Tensor, list[Tensor]] = {}
        for window in self._windows.all:
            if window.holds_gradients:
                # Where a parameter is in two windows, the copies are the same.
                for parameter, entries in window.older.items():
                    older[parameter] = [entry.copy for entry in entries]
        return older

    def load_window(
        self, state: Mapping[str, Any] | None, older: Mapping[Tensor, Sequence[Tensor]] = MappingProxyType({})
    ) -> None:
        """Continues windows from their state; None begins new ones. Gradients were restored before.

        If a window has another number of micro-batches now, the same fraction of it counts as finished.

        Args:
            state: what `window_state` has returned.
            older: what `older_gradients` has returned, divided as gradients are now.
        """
        self.reset()
        if state is None:
            return
        self._items_divisor = state["divisor"]
        self.began |= state["began"]
        for saved, counts in zip(state["windows"], state["counts"], strict=True):
            if saved["sync"]:
                continue
            models = None if saved["models"] is None else frozenset(saved["models"])
            # With another number of ranks a window may have another number of micro-batches.
            done, rest = divmod(saved["micro"] * self.steps, saved["steps"])
            if rest:
                warn_once(
                    "optim",
                    f"the window was saved after {saved['micro']} of {saved['steps']} micro-batches, which is not a whole "
                    f"number of {self.steps}. This one step takes other samples than without the resume; its gradient is their "
                    "mean.",
                )
            restored = Gradients(self._held(models)).parameters
            self._windows.of_models(models).load(saved, counts, max(1, done), self.width, restored, older)
