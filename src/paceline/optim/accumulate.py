"""The ONE owner of gradient scale: it divides losses such that a window's gradient is the mean over the window's samples.

A *window* is the micro-batches of one optimizer step. Strategies average gradients over the ranks that read different
samples (`width` of them), so a loss is divided by

    mean loss:   N / (n * width)     N = samples of the whole window over all ranks, n = of this micro-batch on this rank
    loss sum:    E                   E = a power of two near the window's item count; corrected by width * E / N

If the loader knows its batches beforehand, N is exact from the first micro-batch on. If it cannot be known (an iterable
dataset, tokens), an estimate is used, and the optimizer corrects the gradients once, before clipping and stepping. E is a power
of two, so that dividing by it does not round: the result is the same for every estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from paceline.base.errors import PlanError, TrainError
from paceline.base.log import warn_once
from paceline.plan.data import BatchInfo
from paceline.world.collectives import Collectives

T = TypeVar("T")


class _Loader(Protocol):
    @property
    def current(self) -> BatchInfo | None: ...

    def window_rows(self, count: int) -> int | None: ...


class _ActiveLoaders(Protocol):
    @property
    def top(self) -> _Loader | None: ...

    @property
    def leading(self) -> _Loader | None: ...


class Accumulation:
    """Counts micro-batches and scales losses.

    Args:
        steps: the number of micro-batches in a window.
        width: the number of ranks whose gradients the strategies average.
        active: knows which loader is being iterated (`data.active.ActiveLoaders`).
        collectives: sums item counts over ranks.

    Attributes:
        steps: the number of micro-batches in a window.
        sync: whether the current micro-batch is the last of its window.
        weighs_by_samples: whether losses are weighted by the number of samples. If False, every micro-batch and rank has the
            same weight, and the script controls the windows: outside of `window`, `sync` keeps the value that was set.
        sync_at_end: whether the end of a loader ends the window.
        began: whether any backward pass was scaled here.
        passes: the number of such backward passes.
        declared: whether the loop marks its micro-batches with `accumulate`.
        items: the number of items in all finished windows of this process, over all ranks, if losses are sums over items.
        replicas_equal: False while ranks take separate steps (LocalSGD), until their parameters are averaged.
    """

    def __init__(self, steps: int, width: int, active: _ActiveLoaders, collectives: Collectives) -> None:
        self.steps = steps
        self.width = width
        self.sync = True
        self.weighs_by_samples = True
        self.sync_at_end = True
        self.began = False
        self.passes = 0
        self.declared = False
        self.replicas_equal = True
        self.items = 0
        self._active = active
        self._collectives = collectives
        self._micro = 0  # the number of the current micro-batch in its window, from 1
        self._open = False  # whether the script is inside of `accumulate`
        self._planned: float | None = None  # estimated rows of the window, if the loader does not know them
        self._window: int | None = None  # rows of the window, if the loader knows them
        self._rows = 0  # rows of the window so far
        self._counted = 0  # the micro-batch whose rows were counted last
        self._items: int | None = None  # items of this rank in the window so far
        self._items_micro = 0  # the micro-batch whose items were counted last
        self._divisor: float | None = None  # the power of two by which losses that are sums over items are divided
        self._factor: float | None = None  # the correction of the window's gradients, once it is known

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

    def follow_script(self, sync_at_end: bool = True) -> None:
        """Lets the script control its windows, and gives each micro-batch and rank the same weight."""
        self.weighs_by_samples = False
        self.sync_at_end = sync_at_end

    def mark_replicas(self, *, equal: bool) -> None:
        """Records that ranks take separate steps from now on, or that their parameters are equal again."""
        self.replicas_equal = equal

    # -- the window ------------------------------------------------------------------------------------------

    @contextmanager
    def window(self, hold: Callable[[], AbstractContextManager[object]], done: int | None = None) -> Iterator[None]:
        """Runs one micro-batch.

        Args:
            hold: returns a context in which strategies do not communicate. It is entered unless this micro-batch is the last
                of its window.
            done: the number of finished micro-batches in the window, if the caller counts them; 0 begins a new window.
        """
        self.declared = True
        if done is not None:
            self._micro = done
            self.sync = done == 0
        self._begin()
        with nullcontext() if self.sync else hold():
            self._open = True
            try:
                yield
            finally:
                self._open = False

    @property
    def batch(self) -> Any:
        """The `BatchInfo` of the current batch; None if no prepared loader is being iterated."""
        loader = self._active.top
        return None if loader is None else loader.current

    @property
    def first(self) -> bool:
        """Whether the current micro-batch is the first of its window."""
        return self._micro == 1

    def _begin(self) -> None:
        if self.sync:
            self._micro = 0
        self._micro += 1
        batch = self.batch
        # The last batch of a loader ends its window early: the rest of the window would belong to the next epoch.
        ends = self.sync_at_end and batch is not None and batch.last
        self.sync = ends or self._micro >= self.steps
        if self._micro == 1:
            self._reset(self._active.leading)

    def _reset(self, loader: _Loader | None) -> None:
        self._rows = 0
        self._counted = 0
        self._items_micro = 0
        self._items = None
        self._planned = None
        self._factor = None
        self._window = None
        if loader is not None and self.weighs_by_samples:
            self._window = loader.window_rows(self.steps)

    def _batch(self) -> BatchInfo | None:
        """Returns the current batch, if the loss is weighted by its number of samples."""
        loader = self._active.leading
        if loader is None or not self.weighs_by_samples:
            return None
        return loader.current

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """The number of finished micro-batches in an open window; 0 between windows."""
        return 0 if self.sync else self._micro

    def window_state(self) -> dict[str, Any]:
        """Returns the state of the window. It is the same on all ranks, except for `items`, which are this rank's."""
        # A window that is continued has an estimate only, see `load_window`. So exact rows are saved as an estimate, too.
        planned = self._planned
        if self._window is not None:
            planned = self._window
        return {
            "sync": self.sync,
            "micro": self._micro,
            "steps": self.steps,
            "planned": planned,
            "rows": self._rows,
            "counted": self._counted,
            "items": self._items,
            "items_micro": self._items_micro,
            "divisor": self._divisor,
        }

    def load_window(self, state: Mapping[str, Any] | None) -> None:
        """Continues a window from its state; None begins a new window.

        If a window has another number of micro-batches now, the same fraction of it counts as finished.
        """
        self.sync = True
        self._micro = 0
        self._reset(None)
        if state is None:
            return
        self.sync = state["sync"]
        self._divisor = state["divisor"]
        if self.sync:
            return
        # With another number of ranks a window may have another number of micro-batches.
        micro, rest = divmod(state["micro"] * self.steps, state["steps"])
        if rest:
            warn_once(
                "optim",
                f"the window was saved after {state['micro']} of {state['steps']} micro-batches, which is not a whole number "
                f"of {self.steps}. This one step takes other samples than without the resume; its gradient is their mean.",
            )
        self._micro = max(1, micro)
        self._planned = state["planned"]
        self._rows = state["rows"]
        self._items = state["items"]
        # Whether the last finished micro-batch was counted already, by its number now.
        if state["counted"] == state["micro"]:
            self._counted = self._micro
        if state["items_micro"] == state["micro"]:
            self._items_micro = self._micro

    # -- the scale -------------------------------------------------------------------------------------------

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

    def scale(self, loss: Tensor, num_items: int | Tensor | None = None) -> Tensor:
        """Returns the loss from which the backward pass starts.

        Args:
            loss: the mean over the micro-batch's samples on this rank; with `num_items`, the sum over its items.
            num_items: the number of items (tokens) in `loss` on this rank.

        Ranks: all; only the first call with items communicates.

        Raises:
            TrainError: `accumulate-outside`, `items-mixed`.
        """
        self.began = True
        self.passes += 1
        if not self._open:
            if not self.weighs_by_samples:
                self._micro = 1
                self._reset(None)
                return self._scaled_mean(loss)
            if self.steps > 1:
                raise TrainError(
                    "accumulate-outside",
                    f"backward was called outside `accumulate`, but a step is {self.steps} micro-batches.",
                    why=f"gradient_accumulation_steps={self.steps}: only `accumulate` knows which micro-batch this is",
                    fix="put the body of the loop in `with accelerator.accumulate(model):`",
                )
            self._micro = 1
            self.sync = True
            self._reset(self._active.leading)
        if num_items is not None:
            batch = self._batch()
            # A rank without a sample in the global batch has a filler row.
            if batch is not None and batch.weights[batch.index] == 0:
                # The loss becomes zero, but the backward pass still runs: the collectives of the other ranks need this rank.
                loss = loss * 0.0
                num_items = 0
            return loss / self._items_divisor(int(num_items))
        if self._items is not None:
            raise self._mixed()
        return self._scaled_mean(loss)

    def _scaled_mean(self, loss: Tensor) -> Tensor:
        batch = self._batch()
        # Without a prepared loader, or with the script's own weights, every micro-batch counts the same. A factor of 1 is left
        # out here and below: it would cost a kernel and a node of the graph.
        if batch is None:
            share = self._share_of_idle_ranks()
            if share != 1.0:
                loss = loss * share
            if self.steps != 1:
                loss = loss / self.steps
            return loss
        rows = sum(batch.weights)
        # A micro-batch may have several losses, each with its own `backward`; its rows count once.
        if self._counted != self._micro:
            self._counted = self._micro
            self._rows += rows
        window: float | None = self._window
        if window is None:
            # The loader does not know how many rows the window will have. The first micro-batch gives an estimate, which the
            # others of the window use, too; at the end of the window `correction` replaces it by the exact number.
            if self._planned is None:
                self._planned = float(rows)
                if not self.sync:  # more micro-batches follow, probably of the same size
                    self._planned *= self.steps
            window = self._planned
        own = batch.weights[batch.index]
        if own == 0:
            return loss * 0.0
        # Strategies average gradients over `width` ranks. With the factor `width` here, the average is a sum over rows.
        divisor = window / (own * self.width)
        if divisor == 1.0:
            return loss
        return loss / divisor

    def _share_of_idle_ranks(self) -> float:
        """Returns the weight of this rank's loss if some ranks have no sample: theirs is 0, the others share their weight."""
        batch = self.batch
        if batch is None or all(batch.weights):
            return 1.0
        if not batch.weights[batch.index]:
            return 0.0
        num_with_samples = sum(map(bool, batch.weights))
        return len(batch.weights) / num_with_samples

    def over_ranks(self, loss: T) -> T:
        """Returns the mean over all ranks of a loss that a closure has computed, with the weights of gradients. Ranks: all."""
        if self.width == 1 or not isinstance(loss, Tensor):
            return loss
        batch = self._batch()
        share = 1 / self.width
        if batch is not None:
            share = batch.weights[batch.index] / sum(batch.weights)
        # The loss of filler rows may be NaN, and 0 times NaN is NaN.
        weighted = torch.zeros_like(loss)
        if share:
            weighted = loss.detach() * share
        return cast(T, self._collectives.reduce(weighted))

    def _items_divisor(self, num_items: int) -> float:
        if self._rows or self._items_micro == self._micro:
            raise self._mixed()
        self._items_micro = self._micro
        self._items = (self._items or 0) + num_items
        if self._divisor is None:
            # Only in the first window of a run: later ones take the number of items of the window before.
            (seen,) = self._collectives.sum_ints([num_items])
            # The divisor is near the number of items, so that gradients neither overflow nor underflow. It is a power of two,
            # which divides without rounding; the end of the window replaces it by the exact number.
            self._divisor = 2.0 ** round(max(1, seen * self.steps)).bit_length()
        return self._divisor

    def _mixed(self) -> TrainError:
        return TrainError(
            "items-mixed",
            "one window has losses with and without `num_items`, or several of them in one micro-batch.",
            why="items are counted over the whole window, so each micro-batch must have one backward call, with num_items",
            fix="add the losses of a micro-batch before one `backward(loss, num_items=n)`",
        )

    def correction(self) -> float:
        """Returns the factor by which the gradients of a finished window must be multiplied; 1.0 if the scale was exact.

        Ranks: all, at the end of a window; with items it is one small reduction for each step.
        """
        if self._factor is None:
            if self._items is not None:
                (total,) = self._collectives.sum_ints([self._items])
                assert self._divisor is not None
                self.items += total
                # Gradients are sums divided by the divisor, and averaged over `width` ranks.
                self._factor = self.width * self._divisor / max(1, total)
                self._divisor = 2.0 ** max(1, total).bit_length()
            elif self._planned is not None and self._rows:
                self._factor = self._planned / self._rows
            else:
                self._factor = 1.0
        return self._factor
