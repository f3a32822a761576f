"""The loaders that are being iterated: `backward` and `gather_for_metrics` ask them for the samples of the current batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data.loader import CreatedIterator, GivenBatch, PreparedLoader, T
from paceline.plan.data import BatchInfo
from paceline.world.events import Events
from paceline.world.runtime import Runtime
from paceline.world.tree import first_rows, storage_of, tensors

if TYPE_CHECKING:
    from paceline.data.origins import Origins


class BatchesInUse(IntEnum):
    """Which of the batches that a script was given it may use for a loss, as far as is known. A run only goes up."""

    NEWEST = 0  # the newest one of the only loop
    SEVERAL_LOOPS = 1  # the newest one of some loop, or one that was kept of a loop that the script has left
    HELD = 2  # a batch was given before the one before it was used, or older ones were kept: any that the script has
    AHEAD = 3  # a loss was computed from another batch than the newest one


class ActiveLoaders:
    """A stack of the loaders that are being iterated: the loader of an evaluation inside of a training loop is on top.

    The iterator of a loader pushes and removes it in `try ... finally`, so also after `break` and exceptions.

    Args:
        events: of the run, which are told when training is between two batches, and when an epoch ends.
        runtime: of the run; it may record batches.

    Attributes:
        trained: whether any loader trains.
        unused: whether a loader that trains has yielded a batch that no backward pass has followed.
        in_use: which batches a loss may come from.
    """

    def __init__(self, events: Events | None = None, runtime: Runtime | None = None) -> None:
        self.trained = False
        self.unused = False
        self.in_use = BatchesInUse.NEWEST
        self._used: GivenBatch | None = None  # from which the last loss was computed
        self._events = Events() if events is None else events
        self._runtime = Runtime() if runtime is None else runtime
        self._stack: list[PreparedLoader] = []
        # Loaders that have yielded a batch since the last backward pass, and those from whose batches losses were computed.
        # Weak references, since a loader that the script drops should end its workers at once.
        self._given: weakref.WeakSet[PreparedLoader] = weakref.WeakSet()
        self._sources: weakref.WeakSet[PreparedLoader] = weakref.WeakSet()
        # Pairs (id of a loader, id of one whose loop began later): the first has advanced while that loop was running.
        self._interleaved: set[tuple[int, int]] = set()
        # Iterators that were created but have not begun, each with the loaders that have advanced since. `zip` creates all its
        # iterators before it takes the first batch, and a loop in the body of another one does not.
        self._created: weakref.WeakKeyDictionary[CreatedIterator, weakref.WeakSet[PreparedLoader]]
        self._created = weakref.WeakKeyDictionary()
        # The batches of each storage: the one it belongs to, or those from which it was computed. Batches may be used after
        # their loop has ended: by `itertools.cycle`, or after `next(iter(loader))`.
        self._by_storage: MutableMapping[torch.UntypedStorage, frozenset[GivenBatch]] = weakref.WeakKeyDictionary()
        self._num_storages = 0  # of the newest batch
        # The last ones of loops that the script has left before their end.
        self._left: weakref.WeakSet[GivenBatch] = weakref.WeakSet()
        # The last batch that was given for gradients, as long as losses come from the newest one.
        self._last: weakref.ref[GivenBatch] | None = None
        self._ended_by_current = False  # whether `ends_window` took the last batch for that of the micro-batch
        self._given_since_gather = 0  # in the loop that began last
        # A weak reference, so that a loader which the user drops ends its workers at once.
        self._finished: weakref.ref[PreparedLoader] | None = None

    @property
    def takes_ahead(self) -> bool:
        """Whether a loss was computed from another batch than the newest one: the script takes batches ahead."""
        return self.in_use == BatchesInUse.AHEAD

    @cached_property
    def origins(self) -> Origins:
        """Tells from which batch a loss was computed, where a script has several batches at the same time."""
        from paceline.data.origins import Origins  # most runs have one batch at a time

        return Origins(self._by_storage)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a loader that another process unpickles is in no loop

    # -- which loader weighs a loss --------------------------------------------------------------------------------

    def ends_window(self, before: GivenBatch | None = None) -> bool:
        """Returns whether a window ends with the batch of this micro-batch, as the last one of a loader that trains.

        Args:
            before: the batch of the window's micro-batch before; None if it had none.
        """
        if self.takes_ahead:
            return self.origins.ends_window(self._sources, self._stack, before, self._used)
        if len(self._stack) == 1:  # nearly always
            current = self._stack[0].current
            self._ended_by_current = current is not None and current.last
            return self._ended_by_current
        # If only others have advanced, such as the iterator of a validation that is held open, the batch of this micro-batch
        # was not taken yet.
        sources = [loader for loader in self._stack if loader in self._sources]
        loaders = self._advanced(sources or self._stack)
        return any(loader.current is not None and loader.current.last for loader in loaders)

    def _advanced(self, loaders: Sequence[PreparedLoader]) -> Sequence[PreparedLoader]:
        """Returns those of some loaders that have advanced since the last backward pass, and that train as far as is known.

        Those from which no loss was ever computed count only as long as nothing is known of any.
        """
        given = [loader for loader in loaders if loader in self._given]
        sources = [loader for loader in loaders if loader in self._sources]
        both = [loader for loader in given if loader in self._sources]
        return both or given or sources or loaders

    def source_of(self, loss: Tensor, *, is_whole_step: bool = False) -> GivenBatch | None:
        """Returns the batch whose samples weigh a loss: the one from which it was computed, as far as `Origins` has seen it.

        Args:
            loss: the loss.
            is_whole_step: whether a step has one micro-batch, so that only each rank's share of the samples counts.
        """
        # Has the script another batch than the current one?
        has_others = len(self._by_storage) > self._num_storages if self._stack else self._are_batches_kept()
        if has_others and self.in_use == BatchesInUse.NEWEST:
            self._follow(BatchesInUse.HELD)
        if len(self._stack) < 2 and self.in_use == BatchesInUse.NEWEST:  # nearly always
            newest = self._stack[0].newest if self._stack else None
            batches = [] if newest is None else [newest]
        else:
            advanced = self._advanced([loader for loader in self._stack if loader.given is not None])
            # After several loops, the one that is left is nearly always that of the batch.
            is_sure = len(self._stack) == 1 and self.in_use < BatchesInUse.HELD
            before = None if self._last is None else self._last()
            batches = self.origins.sources_of(loss, self._stack, advanced, before, is_whole_step, is_sure=is_sure)
        for given in batches:
            self._use(given)
        if len(batches) == 1:
            return batches[0]
        # The one whose loop began last, of those without idle ranks.
        return max(reversed(batches), key=lambda given: sum(map(bool, given.info.weights)), default=None)

    def stand_for(self, loss: Tensor, batch: object) -> None:
        """Notes that a number stands for the loss of a batch, which is computed later, as by a pipeline."""
        if len(self._stack) < 2 and self.in_use == BatchesInUse.NEWEST:  # nearly always
            return
        batches: frozenset[GivenBatch] = frozenset()
        for tensor in tensors(batch):
            storage = storage_of(tensor)
            if storage is not None:
                batches |= self._by_storage.get(storage, frozenset())
        if batches:
            self._by_storage[loss.untyped_storage()] = batches

    def _use(self, given: GivenBatch) -> None:
        """Notes that a loss was computed from a batch."""
        loader = given.loader()
        if loader is None:
            return
        self._used = given
        self._sources.add(loader)
        if loader not in self._stack:
            loader.train()
            self.trained = True
        if self.in_use == BatchesInUse.NEWEST:
            return
        self.origins.waiting.discard(given)
        if given is loader.given or self.takes_ahead:
            return
        self._follow(BatchesInUse.AHEAD)
        if self._ended_by_current:
            self.origins.tell_of_early_end()

    @property
    def place(self) -> tuple[int, ...]:
        """Where the batch of the last loss is, or the current one: the same on all ranks, also if a thread takes batches."""
        if self._used is not None:
            return self._used.place()
        return () if self.top is None else (self.top.position.epoch, self.top.position.samples)

    def first_unused(self, loader: PreparedLoader) -> GivenBatch | None:
        """Returns the oldest batch of a loader that a script which takes batches ahead has not used yet."""
        if not self.takes_ahead or loader not in self._sources:
            return None
        return self.origins.first_waiting([loader])

    @property
    def top(self) -> PreparedLoader | None:
        """The loader whose iteration began last and has not ended; None outside of all loops."""
        return self._stack[-1] if self._stack else None

    @property
    def loaders(self) -> list[PreparedLoader]:
        """The loaders that are being iterated, the top one last."""
        return list(self._stack)

    @property
    def beside_top(self) -> list[PreparedLoader]:
        """The loaders that advance together with the top one, as in `zip(first, second)`; empty in most loops."""
        return [loader for loader in self._stack if (id(loader), id(self.top)) in self._interleaved]

    @property
    def leading(self) -> PreparedLoader | None:
        """The loader whose samples the present forward pass has: the top one, or of several that advance together one without
        idle ranks."""
        # Asked at each forward pass, and true of nearly all loops.
        if not self._interleaved:
            return self.top
        loaders = [self.top, *self.beside_top]
        if self.top is None or len(loaders) == 1:
            return self.top
        current = {loader: loader.current for loader in loaders if loader is not None}

        def ranks_with_samples(loader: PreparedLoader) -> int:
            batch = current[loader]
            return 0 if batch is None else sum(map(bool, batch.weights))

        return max(current, key=ranks_with_samples)

    def ended_beside(self, loader: PreparedLoader) -> bool:
        """Whether the epoch of a loader that advances together with this one has just ended, which ends `zip` for both."""
        finished = self.finished
        pairs = ((id(finished), id(loader)), (id(loader), id(finished)))
        return finished is not None and any(pair in self._interleaved for pair in pairs)

    @property
    def finished(self) -> PreparedLoader | None:
        """The loader whose epoch has ended last, until another iteration begins; `gather_for_metrics` may still ask for it."""
        return self._finished() if self._finished is not None else None

    @property
    def idle(self) -> bool:
        """Whether the current batch has no sample for this rank but only filler rows of weight 0.

        Where a script has several batches, it is the one that the model was called with last, if that is known.
        """
        batches = [given.info for given in self.origins.inputs] if self.in_use > BatchesInUse.NEWEST else []
        if not batches and self.leading is not None and self.leading.current is not None:
            batches = [self.leading.current]
        return bool(batches) and all(batch.weights[batch.index] == 0 for batch in batches)

    def gathered(self, values: object = ()) -> BatchInfo | None:
        """Returns the batch of gathered values: their own, the one that a model has seen last, or that of the top loader.

        Args:
            values: tensors, nested; labels that were not copied show their batch.
        """
        if not self._stack or self.in_use > BatchesInUse.NEWEST or len(self._by_storage) > self._num_storages:
            of_values: set[GivenBatch] = set()
            for tensor in tensors(values):
                storage = storage_of(tensor)
                if storage is not None:
                    of_values |= self._by_storage.get(storage, frozenset())
            if len(of_values) == 1:
                self._given_since_gather = 0
                return of_values.pop().info
        # A loop that trains shows by its backward passes whether it holds batches.
        if self._given_since_gather > 1 and self.top is not None and not self.top.trains:
            self._follow(BatchesInUse.HELD)
        self._given_since_gather = 0
        if self.in_use > BatchesInUse.NEWEST and len(self.origins.inputs) == 1:
            (given,) = self.origins.inputs
            if self.in_use >= BatchesInUse.HELD or given.loader() not in self._stack:
                return given.info
        return None if self.top is None else self.top.current

    def earlier(self) -> Iterator[BatchInfo]:
        """Yields the batch of the last loss, and those that the script still has, the newest first.

        Of the latter those with several rows on a rank: one row on each may be a number that each rank has computed.
        """
        if self._used is not None:
            yield self._used.info
        for batches in reversed(list(self._by_storage.values())):
            info = next(iter(batches)).info
            if len(batches) == 1 and max(info.weights) > 1:
                yield info

    def created(self) -> CreatedIterator:
        """Called when an iterator of a loader is created, which passes the result to `push` as it starts."""
        iterator = CreatedIterator()
        self._created[iterator] = weakref.WeakSet()
        return iterator

    def push(self, loader: PreparedLoader, iterator: CreatedIterator | None = None) -> None:
        """Called by a loader's iterator as it starts."""
        self._interleaved = {pair for pair in self._interleaved if id(loader) not in pair}
        if iterator is not None:
            advanced = self._created.pop(iterator, weakref.WeakSet())
            self._interleaved |= {(id(other), id(loader)) for other in self._stack if other in advanced}
        self._stack.append(loader)
        self._given_since_gather = 0
        if self.in_use > BatchesInUse.NEWEST:
            # What is gathered in this loop may come from a model that is not prepared, and shows no batch.
            self.origins.inputs.clear()
        self._events.loop_began(loader)
        if len(self._stack) > 1 or self._are_batches_kept(beside=loader):
            self._follow(BatchesInUse.SEVERAL_LOOPS)
        if len(self._stack) == 1:
            self._events.outside_loops(False)
        self._finished = None

    def _are_batches_kept(self, beside: PreparedLoader | None = None) -> bool:
        """Returns whether the script has kept batches, other than the variable of a loop that has ended.

        Args:
            beside: a loader whose batches do not count.
        """
        kept: dict[object, set[GivenBatch]] = {}
        for batches in self._by_storage.values():
            for given in batches:
                if beside is None or given.loader() is not beside:
                    kept.setdefault(given.loader, set()).add(given)
        return any(len(batches) > 1 or not self._left.isdisjoint(batches) for batches in kept.values())

    def remove(self, loader: PreparedLoader, finished: bool = False) -> None:
        """Removes the last entry of `loader`, which need not be the top: a script may interleave loops."""
        self._events.loop_over(loader, finished)
        if not finished and loader.newest is not None:
            self._left.add(loader.newest)
        if finished:
            self._finished = weakref.ref(loader)
        elif not self.ended_beside(loader):  # `zip` ends its loops one after the other
            self._finished = None
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is loader:
                del self._stack[place]
                break
        if not self._stack and self.in_use == BatchesInUse.NEWEST:
            self._events.outside_loops(True)

    def called_outside(self, model: nn.Module, *inputs: object) -> None:
        """Called before a prepared model is called outside of all loops: a script may have kept batches for it."""
        if torch.compiler.is_compiling():
            return
        is_kept = any(storage_of(tensor) in self._by_storage for tensor in tensors(inputs))
        if is_kept or self._may_be_of_last(inputs):
            self._follow(BatchesInUse.HELD)
            self.origins.call(model, inputs)

    def _may_be_of_last(self, inputs: object) -> bool:
        """Returns whether inputs may be copies of the last batch: no loss was computed from it, and they have as many rows."""
        last = None if self._last is None else self._last()
        if last is None or last.loader() not in self._given:
            return False
        is_kept = any(last in batches for batches in self._by_storage.values())
        return is_kept and first_rows(inputs) == last.seen_rows

    def train(self) -> None:
        """Called by each backward pass: the loaders that are being iterated are marked as loaders that train."""
        self.unused = False
        self._given.clear()
        self.trained |= bool(self._stack)
        for loader in self._stack:
            loader.train()

    def is_source_of_several(self, loader: PreparedLoader) -> bool:
        """Whether losses were computed from a loader, where several loops run: a resumed run must know whose end counts."""
        return len(self._stack) > 1 and loader in self._sources

    def loaded(self, loader: PreparedLoader, takes_ahead: bool, is_source: bool) -> None:
        """Called when a loader has loaded a state: it may have trained in the run that saved, which may have taken ahead."""
        self.trained |= loader.trains
        if takes_ahead or is_source:
            self._sources.add(loader)
        if takes_ahead:
            self._follow(BatchesInUse.AHEAD)

    def give(self, given: GivenBatch, batch: object) -> None:
        """Called by a loader's iterator when it yields a batch."""
        loader = given.loader()
        assert loader is not None
        self.unused |= loader.trains
        # Without gradients it is an evaluation, which uses batches without a backward pass.
        if loader in self._given and self.in_use < BatchesInUse.HELD and torch.is_grad_enabled():
            self._follow(BatchesInUse.HELD)
        self._given.add(loader)
        self._given_since_gather += 1
        alone = frozenset((given,))
        storages: set[torch.UntypedStorage] = set()
        for tensor in tensors(batch):
            storage = storage_of(tensor)
            if storage is None:
                continue
            storages.add(storage)
            known = self._by_storage.setdefault(storage, alone)
            if known is not alone:
                # Views of one tensor may be batches of several loaders.
                others = [other for other in known if other.loader != given.loader]
                self._by_storage[storage] = frozenset([*others, given])
        self._num_storages = len(storages)
        if self.in_use > BatchesInUse.NEWEST:
            self.origins.remember(given)
        elif torch.is_grad_enabled():
            self._last = weakref.ref(given)
        for later in self._stack[self._stack.index(loader) + 1 :]:
            self._interleaved.add((id(loader), id(later)))
        if self._created:  # which it hardly ever is, and to iterate it costs a microsecond
            for advanced in self._created.values():
                advanced.add(loader)

    def _follow(self, in_use: BatchesInUse) -> None:
        """Notes which batches a loss may come from; where these are several, each is followed from the current one on."""
        begins = self.in_use == BatchesInUse.NEWEST
        self.in_use = max(self.in_use, in_use)
        if not begins:
            return
        last = None if self._last is None else self._last()
        if last is not None:
            self.origins.remember(last)
            if last is self._used:
                self.origins.waiting.discard(last)
        self._events.outside_loops(False)
        self._events.several_batches()

    def ask(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator when it is asked for another batch: the run may be between two batches.

        It is not, if a batch of another loader has not had its backward pass yet, or if this loop is in the body of a loop
        over another loader that trains. A loader that has advanced in the meantime is not around this loop but beside it.
        """
        if not loader.trains:
            if self.trained:
                self._events.between_evaluation_batches()
            return
        if self.unused or not self._events.between_batches:
            return
        # What is below this loop on the stack began earlier.
        around = self._stack[: self._stack.index(loader)]
        if not any(outer.trains and (id(outer), id(loader)) not in self._interleaved for outer in around):
            self._events.between_batches()

    def end(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator after all batches, while its position is still that of the last one."""
        if loader.trains:
            self._events.epoch_over()

    def observed(self, batches: Iterator[T]) -> Iterator[T]:
        """Shows batches to the runtime, and returns them. If phases are measured, the wait for each is the phase "data"."""
        batches = self._runtime.batches(batches)
        return self._in_phase(batches) if self._events.phase.is_followed else batches

    def _in_phase(self, batches: Iterator[T]) -> Iterator[T]:
        # The phase is open only while the next batch is waited for, and not in the body of the script's loop.
        try:
            while True:
                with self._events.phase["data"]:
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                yield batch
        finally:
            close: Callable[[], None] | None = getattr(batches, "close", None)
            if close is not None:
                close()

    def training(self) -> list[PreparedLoader]:
        """Returns the loaders that train and are being iterated, the outermost first."""
        return [loader for loader in self._stack if loader.trains]

    def __len__(self) -> int:
        return len(self._stack)
