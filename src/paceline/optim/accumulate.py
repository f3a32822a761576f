"""The ONE owner of gradient scale: what a loss is divided by, so that a window's gradient is the mean over its samples.

A *window* is the micro-batches of one optimizer step. Strategies average gradients over the ranks that read different
samples (`width` of them), so a loss is divided by

    mean loss:   N / (n * width)     N = samples of the whole window over all ranks, n = of this micro-batch on this rank
    loss sum:    E / 1               E = a power of two near the window's item count; corrected by width * E / N

Where the loader knows its batches beforehand, N is exact from the first micro-batch. Where nothing can know it (an
iterable dataset, tokens), an estimate stands in and the optimizer corrects the gradients once, before clip or step. The
estimate is a power of two, so dividing by it rounds nothing: the same numbers come out whatever it was.
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


class Accumulation:
    """Counts micro-batches and scales losses.

    Args:
        steps: micro-batches in a window.
        width: ranks whose gradients the strategies average.
        active: tells which loader is being iterated (`data.active.ActiveLoaders`).
        collectives: for item counts.

    Attributes:
        steps: micro-batches in a window.
        sync: whether the micro-batch at hand ends its window.
        weigh: False gives every micro-batch and rank the same weight, and lets a script hold its windows itself: outside
            of `window`, `sync` stays what it was set to.
        sync_at_end: whether the end of a loader ends the window.
        began: whether some backward pass went this way.
        passes: how many did.
        declared: whether the loop says, by `accumulate`, where its micro-batches are.
        items: of all windows that have ended since the process began, over all ranks, where losses are sums over items.
        replicas_equal: False once ranks have taken steps of their own, until their parameters are averaged.
    """

    def __init__(self, steps: int, width: int, active: _ActiveLoaders, collectives: Collectives) -> None:
        self.steps = steps
        self.width = width
        self.sync = True
        self.weigh = True
        self.sync_at_end = True
        self.began = False
        self.passes = 0
        self.declared = False
        self.replicas_equal = True
        self.items = 0
        self._active = active
        self._collectives = collectives
        self._micro = 0  # micro-batches of this window so far, this one included
        self._open = False  # inside `accumulate`
        self._planned: float | None = None  # rows that the window was expected to have, where scale was an estimate
        self._window: int | None = None  # rows of the window, where the loader knows
        self._rows = 0  # rows that it really had so far
        self._counted = 0  # micro-batch whose rows were counted
        self._items: int | None = None  # items of this rank in the window so far
        self._items_micro = 0
        self._divisor: float | None = None  # power of two that item losses are divided by
        self._factor: float | None = None  # correction of the window's gradients, once it is known

    def over(self, width: int, collectives: Collectives) -> None:
        """Ranks whose gradients are averaged, where they were not known before."""
        self.width = width
        self._collectives = collectives

    def set_steps(self, steps: int) -> None:
        """Windows of another length from now on.

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
        """Lets a script hold its windows itself, and gives each micro-batch and rank the same weight."""
        self.weigh = False
        self.sync_at_end = sync_at_end

    def mark_replicas(self, *, equal: bool) -> None:
        """Says that ranks take steps of their own from here on, or that their parameters are equal again."""
        self.replicas_equal = equal

    # -- the window ------------------------------------------------------------------------------------------

    @contextmanager
    def window(self, hold: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """One micro-batch. `hold()` keeps strategies from communicating; it is entered unless the window ends here."""
        self.declared = True
        self._begin()
        with nullcontext() if self.sync else hold():
            self._open = True
            try:
                yield
            finally:
                self._open = False

    @property
    def batch(self) -> Any:
        """What the loader that is being iterated says of the batch at hand; None where there is no such loader."""
        loader = self._active.top
        return None if loader is None else loader.current

    @property
    def first(self) -> bool:
        """Whether the micro-batch at hand is the first of its window."""
        return self._micro == 1

    def _begin(self) -> None:
        if self.sync:
            self._micro = 0
        self._micro += 1
        batch = self.batch
        # The last batch of a loader ends its window early; the rest of the window would come from the next epoch.
        ends = self.sync_at_end and batch is not None and batch.last
        self.sync = ends or self._micro >= self.steps
        if self._micro == 1:
            self._reset(self._active.top)

    def _reset(self, loader: _Loader | None) -> None:
        self._rows = 0
        self._counted = 0
        self._items_micro = 0
        self._items = None
        self._planned = None
        self._factor = None
        self._window = None
        if loader is not None and self.weigh:
            self._window = loader.window_rows(self.steps)

    def _batch(self) -> BatchInfo | None:
        """The batch at hand, where its counts weigh the loss."""
        loader = self._active.top
        return loader.current if loader is not None and self.weigh else None

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Micro-batches done in the window that is open; 0 between windows."""
        return 0 if self.sync else self._micro

    def window_state(self) -> dict[str, Any]:
        """Where the window stands; the same on all ranks, except `items`, which are this rank's."""
        return {
            "sync": self.sync,
            "micro": self._micro,
            "steps": self.steps,
            "planned": self._planned if self._window is None else self._window,
            "rows": self._rows,
            "counted": self._counted,
            "items": self._items,
            "items_micro": self._items_micro,
            "divisor": self._divisor,
        }

    def load_window(self, state: Mapping[str, Any] | None) -> None:
        """Goes on in the window of which `window_state` told; None begins a new one.

        Where a step has another number of micro-batches by now, the window ends after as large a part of its own.
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
        # A run with another number of ranks may have another number of micro-batches: the same share of the window is done.
        micro, rest = divmod(state["micro"] * self.steps, state["steps"])
        if rest:
            warn_once(
                "optim",
                f"the window was saved after {state['micro']} of {state['steps']} micro-batches, which is no whole number of "
                f"{self.steps}: this one step takes other samples than it would have. Its mean is over what it takes.",
            )
        self._micro = max(1, micro)
        self._planned = state["planned"]
        self._rows = state["rows"]
        self._items = state["items"]
        # Counted at the micro-batch that is done, wherever that stands now.
        self._counted = self._micro if state["counted"] == state["micro"] else 0
        self._items_micro = self._micro if state["items_micro"] == state["micro"] else 0

    # -- the scale -------------------------------------------------------------------------------------------

    @staticmethod
    def checked(loss: object, keywords: Mapping[str, object]) -> Tensor:
        """The loss, if `backward` can begin there; `keywords` are the keywords of `Tensor.backward`.

        Raises:
            TrainError: `backward-loss`.
        """
        if not isinstance(loss, Tensor):
            why = f"it is a {type(loss).__name__}, which does not know how it was computed"
            fix = "pass the tensor that the loss function returned; take `.item()` or `float()` for printing only"
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
        """The loss as `backward` should see it.

        Args:
            loss: the mean over this micro-batch's samples on this rank; with `num_items`, the sum over its items.
            num_items: items (tokens) in `loss` on this rank.

        Ranks: all call it; it communicates at the first call with items only.

        Raises:
            TrainError: `accumulate-outside`, `items-mixed`.
        """
        self.began = True
        self.passes += 1
        if not self._open:
            if not self.weigh:
                self._micro = 1
                self._reset(None)
                return self._weigh(loss)
            if self.steps > 1:
                raise TrainError(
                    "accumulate-outside",
                    f"backward was called outside `accumulate`, but a step is {self.steps} micro-batches.",
                    why=f"gradient_accumulation_steps={self.steps}: only `accumulate` knows which micro-batch this is",
                    fix="put the body of the loop in `with accelerator.accumulate(model):`",
                )
            self._micro = 1
            self.sync = True
            self._reset(self._active.top)
        if num_items is not None:
            batch = self._batch()
            # This rank has no sample in the global batch, but a row that other ranks hold.
            if batch is not None and batch.weights[batch.index] == 0:
                # Times zero, and not left out: the backward pass of this rank takes part in the collectives of the others.
                loss = loss * 0.0
                num_items = 0
            return loss / self._items_divisor(int(num_items))
        if self._items is not None:
            raise self._mixed()
        return self._weigh(loss)

    def _weigh(self, loss: Tensor) -> Tensor:
        batch = self._batch()
        if batch is None:  # no loader of ours, or the script's own weights: every micro-batch counts the same
            share = self._share_of_idle_ranks()
            loss = loss if share == 1.0 else loss * share
            return loss if self.steps == 1 else loss / self.steps
        rows = sum(batch.weights)
        # A micro-batch may have several losses, each with its own `backward`; its rows count once.
        if self._counted != self._micro:
            self._counted = self._micro
            self._rows += rows
        window: float | None = self._window
        if window is None:
            # The loader does not know how long the window will be. The first micro-batch gives an estimate, which all others of
            # the window use too; the end of the window corrects it.
            if self._planned is None:
                self._planned = float(rows * (1 if self.sync else self.steps))
            window = self._planned
        own = batch.weights[batch.index]
        if own == 0:
            return loss * 0.0
        # Gradients are averaged over `width` ranks afterwards; times `width` here makes that average a sum over rows.
        divisor = window / (own * self.width)
        return loss if divisor == 1.0 else loss / divisor

    def _share_of_idle_ranks(self) -> float:
        """What a loss counts where some ranks have no sample: theirs nothing, and the others' as much more."""
        batch = self.batch
        if batch is None or all(batch.weights):
            return 1.0
        return len(batch.weights) / sum(map(bool, batch.weights)) if batch.weights[batch.index] else 0.0

    def over_ranks(self, loss: T) -> T:
        """What a closure computed on this rank as the mean over all ranks, weighed as its gradient is. Ranks: all."""
        if self.width == 1 or not isinstance(loss, Tensor):
            return loss
        batch = self._batch()
        share = 1 / self.width
        if batch is not None:
            share = batch.weights[batch.index] / sum(batch.weights)
        weighed = loss.detach() * share if share else torch.zeros_like(loss)
        return cast(T, self._collectives.reduce(weighed))

    def _items_divisor(self, num_items: int) -> float:
        if self._rows or self._items_micro == self._micro:
            raise self._mixed()
        self._items_micro = self._micro
        self._items = (self._items or 0) + num_items
        if self._divisor is None:
            (seen,) = self._collectives.sum_ints([num_items])
            # Close to the number of items, so that gradients keep an ordinary size. A power of two divides without rounding,
            # and the exact number replaces it at the end of the window.
            self._divisor = 2.0 ** round(max(1, seen * self.steps)).bit_length()
        return self._divisor

    def _mixed(self) -> TrainError:
        return TrainError(
            "items-mixed",
            "one window holds losses that are weighed in different ways.",
            why="`num_items` counts items over the whole window, so each micro-batch has one backward call, with num_items",
            fix="add the losses of a micro-batch before one `backward(loss, num_items=n)`",
        )

    def correction(self) -> float:
        """What gradients of the finished window must be multiplied by; 1.0 where the scale was exact.

        Ranks: all call it at the end of a window; with items it is the one small reduction of the step.
        """
        if self._factor is None:
            if self._items is not None:
                (total,) = self._collectives.sum_ints([self._items])
                assert self._divisor is not None
                self.items += total
                self._factor = self.width * self._divisor / max(1, total)
                self._divisor = 2.0 ** max(1, total).bit_length()
            elif self._planned is not None and self._rows:
                self._factor = self._planned / self._rows
            else:
                self._factor = 1.0
        return self._factor
