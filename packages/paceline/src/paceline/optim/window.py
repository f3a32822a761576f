"""`Window`: the micro-batches of one optimizer step of a set of models, and the `Mean`s of which their losses are parts.

    enter      begins a micro-batch, and a new window after the last one of the window before
    parts      each backward pass adds a part of one mean: over a loader's samples, over items, or over micro-batches
    leave      ends the micro-batch; one without a backward pass, which the script has left out, does not count

Nothing here communicates, and nothing here changes a gradient: `Accumulation` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.optim.mean import Mean
from paceline.world.sharded import local


@dataclass(frozen=True)
class Older:
    """A gradient that is older than its window.

    Attributes:
        gradient: the tensor that held it; None after a resume.
        copy: a copy from before the window, divided as it was.
    """

    gradient: Tensor | None
    copy: Tensor


class Window:
    """The micro-batches of one optimizer step of some models.

    Args:
        steps: the number of micro-batches.

    Attributes:
        steps: the number of micro-batches.
        sync: whether the current micro-batch, or the last one, ends the window, so that optimizers step.
        is_open: whether the script is inside of a micro-batch.
        number: of the window among those of its models, from 1.
        micro_batch: the number of the current micro-batch, from 1; that of the last one outside.
        means: the means of which losses of this window are parts.
        members: the parameters that took part in a backward pass of this window.
        older: copies of gradients from before the window, which nobody has cleared, by parameter; see `Older`.
        source: the batch of the last loss, if it was one of a prepared loader.
        has_passed: whether the current micro-batch had a backward pass.
        ready: the parameters that took part in one of the last micro-batch, or whose gradients were used in it.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sync = True
        self.is_open = False
        self.micro_batch = 0
        self._num_items_losses = 0  # in this micro-batch
        self._num_losses = 0
        self.number = 0
        self.has_passed = False
        self._counts_itself = False  # whether the script counts its micro-batches
        self.source: object = None
        self._begin()

    def _begin(self) -> None:
        self.means: list[Mean] = []
        self.members: set[Tensor] = set()
        self.older: dict[Tensor, list[Older]] = {}
        self.ready: set[Tensor] = set()
        self.number += 1
        self._done = 0

    @property
    def done(self) -> int:
        """The number of micro-batches of this window that had their backward pass."""
        return self.micro_batch if self.has_passed else self._done

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of this window wait for further micro-batches."""
        return not self.sync and self.done > 0

    def enter(self, steps: int, is_last: Callable[[], bool]) -> None:
        """Begins a micro-batch.

        Args:
            steps: the number of micro-batches from now on.
            is_last: returns whether the window ends with this micro-batch in any case, as at the end of a loader. It is asked
                only where it matters, since a loader may have to read ahead to know.
        """
        if self._done == 0:
            self._begin()
        self.steps = steps
        self.micro_batch = self._done + 1
        self.sync = self.micro_batch >= steps or is_last()
        self.is_open = True
        self._num_items_losses = 0
        self._num_losses = 0
        self.has_passed = False

    def enter_alone(self) -> None:
        """Begins a window of one backward pass, which no `accumulate` surrounds."""
        self._done = 0
        self.enter(1, lambda: True)
        self.is_open = False

    def continue_after(self, done: int) -> None:
        """Says how many micro-batches are finished, for a script that counts them itself; 0 begins a new window."""
        self._done = done
        self._counts_itself = True

    def declare(self, *, sync: bool) -> None:
        """Says whether the current micro-batch ends the window, for a script that counts them itself."""
        self.sync = sync

    def leave(self) -> None:
        """Ends a micro-batch."""
        self.is_open = False
        if not self.has_passed and not self._counts_itself:
            return
        self.has_passed = False
        self._done = self.micro_batch
        if self.sync:
            self._done = 0

    def keep_older(self, held: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies gradients from before the window.

        Args:
            held: parameters, each with its gradients.
        """
        held = [(parameter, gradient) for parameter, gradient in held if parameter not in self.older]
        for parameter, gradient in held:
            self.older.setdefault(parameter, []).append(Older(gradient, gradient.clone()))

    def older_in(self, held: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's part of each gradient that has parts from before the window, with these parts.

        Args:
            held: parameters, each with its gradients.
        """
        places_of: dict[Tensor, list[Tensor]] = {}
        for parameter, gradient in held:
            if parameter in self.older:
                places_of.setdefault(parameter, []).append(gradient)
        seen: set[int] = set()  # parameters may share one gradient
        for parameter, places in places_of.items():
            for older in self.older[parameter]:
                # A strategy may have put another tensor in its place, which holds the same gradient.
                place = next((place for place in places if place is older.gradient), None)
                copy = local(older.copy)
                if place is None:
                    place = next((place for place in places if local(place).shape == copy.shape), None)
                if place is not None and id(place) not in seen:
                    seen.add(id(place))
                    yield local(place), copy

    def passed(self, parameters: Set[Tensor], mean: Mean | None) -> None:
        """Records that a backward pass has given parts of a mean to the gradients of these parameters."""
        self.has_passed = True
        if not parameters:
            return
        self.members |= parameters
        if self.sync:
            self.ready |= parameters
        if mean is not None:
            mean.take_part(parameters)

    def mean(self, kind: str, source: object) -> Mean | None:
        """Returns the mean of a kind and a source, if a loss of this window was a part of it."""
        for mean in self.means:
            if mean.kind == kind and mean.belongs_to(source):
                return mean
        return None

    def begin_mean(self, kind: str, source: object, *, is_local: bool) -> Mean:
        """Adds a mean, of which the losses of this window may be parts from now on."""
        mean = Mean(kind, source, is_local=is_local)
        self.means.append(mean)
        return mean

    def next_items_loss(self) -> int:
        """Returns the number of a loss with items in its micro-batch, from 0: the losses of one number are one mean."""
        number = self._num_items_losses
        self._num_items_losses += 1
        return number

    def note_loss(self, source: object) -> int:
        """Notes the batch of a loss, and returns the number of the loss in its micro-batch, from 0."""
        self.source = source
        number = self._num_losses
        self._num_losses += 1
        return number

    def used(self, parameters: Iterable[Tensor]) -> None:
        """Records that gradients of these parameters are used, so that they wait for no other pass of the last micro-batch."""
        if self.sync:
            self.ready |= self.members.intersection(parameters)

    def keeps(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether gradients of these parameters wait for a later backward pass of this window.

        In the last micro-batch they do so until one of them has taken part in it, or was clipped or stepped.
        """
        if self.sync and self._done == 0:
            return False  # nearly always, and a large model has many
        chosen = set(parameters)
        if self.members.isdisjoint(chosen):
            return False
        # `_done` counts micro-batches that have ended. Without one, gradients are older than the window, unless the first
        # micro-batch has had its pass and others follow.
        return self.holds_gradients if self._done == 0 else self.ready.isdisjoint(chosen)

    def forget(self, parameters: Set[Tensor]) -> None:
        """Forgets that the gradients of these parameters have parts of means: they were cleared."""
        for mean in self.means:
            mean.forget(parameters)
        for parameter in parameters:
            self.older.pop(parameter, None)

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of the window. The same on all ranks: what each has counted alone is in `counts`."""
        means = [mean.state() for mean in self._open_means()]
        return {"sync": self.sync, "micro": self.done, "steps": self.steps, "means": means}

    def counts(self) -> list[float | None]:
        """Returns what this rank has counted of each mean of an open window; None where all ranks have the same."""
        return [mean.counted if mean.is_local else None for mean in self._open_means()]

    def _open_means(self) -> list[Mean]:
        return [] if self.sync else self.means

    def load(
        self,
        state: Mapping[str, Any],
        counts: Sequence[float | None],
        done: int,
        width: int,
        parameters: Set[Tensor],
        older: Mapping[Tensor, Sequence[Tensor]],
    ) -> None:
        """Continues a window.

        Args:
            state, counts: what these methods have returned.
            done: the number of its finished micro-batches, as they are counted from now on.
            width: the number of ranks whose gradients are averaged.
            parameters: those that have a gradient of the window.
            older: what `older_gradients` of the window has returned.
        """
        self._begin()
        for parameter, copies in older.items():
            self.older[parameter] = [Older(None, copy) for copy in copies]
        self.sync = False
        self._done = self.micro_batch = done
        self.members |= parameters
        for described, counted in zip(state["means"], counts, strict=True):
            mean = Mean.of_state(described, width, parameters)
            # The last finished micro-batch has another number now, and was counted already or not.
            was_counted = described["micro_batch"] == state["micro"]
            mean.count(counted or 0.0, done if was_counted else 0)
            self.means.append(mean)


class Windows:
    """The windows of a run: one for each set of models that a script names in `accumulate`, and one without a name.

    Attributes:
        current: the window of the micro-batch that began last.
        by_models: the windows by the numbers of their models.
        all: the same windows.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # That of a script without `accumulate`, or that counts its micro-batches itself, is None.
        self.by_models: dict[frozenset[int] | None, Window] = {None: Window(steps)}
        self.current = self.by_models[None]
        self.all = [self.current]

    def of_models(self, models: frozenset[int] | None) -> Window:
        """Returns the window of models, by their numbers; it becomes the current one."""
        window = self.by_models.get(models)
        if window is None:
            window = self.by_models[models] = Window(self._steps)
            self.all.append(window)
        self.current = window
        return window

    def of(self, parameters: Iterable[Tensor]) -> list[Window]:
        """Returns the windows in which parameters took part; the current one if they took part in none."""
        if len(self.all) == 1:
            return self.all
        chosen = set(parameters)
        windows = [window for window in self.all if not window.members.isdisjoint(chosen)]
        return windows or [self.current]

    def state(self) -> list[dict[str, Any]]:
        """Returns the states of all windows, in the order of `all`."""
        states = []
        for models, window in self.by_models.items():
            named = None if models is None else sorted(models)
            states.append({"models": named, **window.state()})
        return states
