"""`Origins`: from which batch a loss was computed, where a script has several batches at the same time.

    remember     a loader yields a batch                   it waits for a loss
    call         a prepared model is called with them      `inputs` are the batches
    mark         it has returned                           the nodes and the storages of its outputs get the batches
    of_loss      a backward pass begins                    the graph is walked from the loss to the first marked nodes

Nothing of this happens before two loops run at the same time, or a script takes a batch before it has used the one before, or
keeps one. A batch that is copied before the model sees it is not recognised: the outputs that were computed from it are marked
with no batch. A detached output is recognised, since it shares the storage. What is not marked at all was computed before, or
has no output in its graph, as the gradient of one: it is taken for what the model was called with last.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.base.log import warn_once
from paceline.world.forward import OwnHook
from paceline.world.tree import first_rows, storage_of, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

    from paceline.data.loader import GivenBatch, PreparedLoader
    from paceline.plan.data import BatchInfo

    Batches = frozenset[GivenBatch]

_MARK = "paceline.batches"  # in the metadata of a node
_MOST_NODES = 20_000  # between a loss and the outputs of models there are few


class Origins:
    """The batches that a script has at the same time, and the outputs that were computed from them.

    Args:
        by_storage: the batches of each storage: the one it belongs to, or those from which it was computed.

    Attributes:
        inputs: the batches from which the inputs come of the prepared model that was called last, as far as is known.
        waiting: the batches from which no loss was computed, as long as any of their tensors is there.
    """

    def __init__(self, by_storage: MutableMapping[torch.UntypedStorage, Batches]) -> None:
        self._by_storage = by_storage
        # What `_of` has returned for the inputs of a model that is being called.
        self._called: MutableMapping[nn.Module, tuple[Batches, bool]] = weakref.WeakKeyDictionary()
        self.inputs: weakref.WeakSet[GivenBatch] = weakref.WeakSet()
        # With which outputs were marked last, if no loss was computed from these.
        self._latest: weakref.WeakSet[GivenBatch] = weakref.WeakSet()
        self.waiting: weakref.WeakSet[GivenBatch] = weakref.WeakSet()
        self._last_infos: deque[BatchInfo] = deque(maxlen=2)  # of the batches that were given last

    def remember(self, given: GivenBatch) -> None:
        """Records a batch that a loader yields."""
        self.waiting.add(given)
        self._last_infos.append(given.info)

    def first_waiting(self, loaders: Iterable[PreparedLoader]) -> GivenBatch | None:
        """Returns the oldest batch of some loaders from which no loss was computed; None without one."""
        chosen = set(loaders)
        waiting = [given for given in self.waiting if given.loader() in chosen]
        return min(waiting, key=lambda given: given.place(), default=None)

    def ends_window(
        self,
        sources: Iterable[PreparedLoader],
        running: Sequence[PreparedLoader],
        before: GivenBatch | None,
        used: GivenBatch | None,
    ) -> bool:
        """Returns whether a window ends with the batch of this micro-batch, where a script takes batches ahead or keeps them.

        It uses them in their order.

        Args:
            sources: the loaders from whose batches losses were computed.
            running: those that are being iterated; they count if no batch of the others waits.
            before: the batch of the last loss of these models; None if they had none.
            used: that of the last loss of any model.
        """
        batch = self.first_waiting(sources) or self.first_waiting(running)
        # Other models have used batches, which these models use, too; the loop may have gone on with another loader.
        is_of_others = used is not None and used is not before and (batch is None or batch.loader == used.loader)
        if is_of_others:
            batch = used
        if is_of_others or batch is None:
            batch = self._next_kept(running, before, used) or batch
        loader = None if batch is None else batch.loader()
        # A stream looks whether it has more than the newest batch.
        return batch is not None and loader is not None and loader.newest is batch and batch.info.last

    def _next_kept(
        self, running: Sequence[PreparedLoader], before: GivenBatch | None, used: GivenBatch | None
    ) -> GivenBatch | None:
        """Returns the batch that models get next which pass over the batches that a script has kept of a loop that runs."""
        last = before or used
        if last is None or last.loader() not in running:
            return None
        kept = {given for batches in self._by_storage.values() for given in batches if given.loader == last.loader}
        in_order = sorted(kept, key=lambda given: given.place())
        later = [given for given in in_order if before is None or given.place() > before.place()]
        return next(iter(later or in_order), None)

    def tell_of_early_end(self) -> None:
        """Warns that a window has ended with the newest batch and not with the one that was used."""
        warn_once(
            "data",
            "one window of micro-batches has ended too early: the script takes batches ahead, which the first loss has shown. "
            "From here on a window ends with the last batch that is used.",
        )

    def watch(self, model: nn.Module) -> None:
        """Registers the hooks that see the inputs of a prepared model and mark its outputs."""
        # A function with a weak reference: a copy of the model copies its hooks.
        origins = weakref.ref(self)

        def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            tracker = origins()
            if tracker is not None and not torch.compiler.is_compiling():
                tracker.call(module, (args, kwargs))

        def mark(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            tracker = origins()
            if tracker is not None and not torch.compiler.is_compiling():
                tracker.mark(module, output)

        # Before the hooks of strategies, which may copy the inputs: FSDP2 converts them to half precision.
        model.register_forward_pre_hook(OwnHook(begin), with_kwargs=True, prepend=True)
        model.register_forward_hook(OwnHook(mark))

    def call(self, model: nn.Module, inputs: object) -> None:
        """Records the batches of the inputs of a model that is being called."""
        batches, is_older = self._of(inputs)
        self._called[model] = (batches, is_older)
        # What has another number of rows is no copy of a batch, such as an example that one rank alone looks at.
        if batches or is_older or first_rows(inputs) in {info.loaded for info in self._last_infos}:
            self.inputs = weakref.WeakSet(batches)

    def mark(self, model: nn.Module, output: object) -> None:
        """Marks the nodes and the storages of a model's outputs with the batches of its inputs; see `_of`."""
        batches, is_older = self._called.pop(model, (frozenset(), True))
        if not torch.is_grad_enabled() or (is_older and not batches):
            return
        self._latest = weakref.WeakSet(batches)
        for tensor in tensors(output):
            _metadata(tensor)[_MARK] = batches
            storage = storage_of(tensor)
            if storage is not None:
                self._by_storage[storage] = batches

    def _of(self, inputs: object) -> tuple[Batches, bool]:
        """Returns the batches of some inputs, and whether one was computed before outputs were marked."""
        batches: Batches = frozenset()
        is_older = False
        for tensor in tensors(inputs):
            # The output of another model, such as the generator of a GAN, comes from that model's inputs.
            of_node = _metadata(tensor).get(_MARK)
            storage = storage_of(tensor)
            of_storage = None if storage is None else self._by_storage.get(storage)
            batches |= of_node or frozenset()
            batches |= of_storage or frozenset()
            if tensor.grad_fn is not None and of_node is None and of_storage is None:
                is_older = True
        return batches, is_older

    def sources_of(
        self,
        loss: Tensor,
        running: Sequence[PreparedLoader],
        advanced: Sequence[PreparedLoader],
        before: GivenBatch | None,
        is_whole_step: bool,
        *,
        is_sure: bool,
    ) -> list[GivenBatch]:
        """Returns the batches from which a loss was computed: one of each loader, in the order in which their loops began.

        Args:
            loss: the loss.
            running: the loaders that are being iterated.
            advanced: those of them whose current batches count where nobody saw from which one the loss was computed.
            before: the batch that was given last before models were watched, so that no model has marked its losses.
            is_whole_step: whether a step has one micro-batch, so that only each rank's share of the samples counts.
            is_sure: whether it is `advanced` where nobody saw it.
        """
        seen = self.of_loss(loss)
        if is_sure and (seen is None or None in seen):
            return [loader.given for loader in advanced if loader.given is not None]
        current = [loader.given for loader in running if loader.given is not None]
        if seen is None and before is not None and before in {*current, *self.waiting}:
            return [before]
        if seen is None and len(self._latest) == 1:
            return list(self._latest)
        self._latest.clear()
        kept = {given for batches in self._by_storage.values() for given in batches}
        infos = [given.info for given in (*current, *kept)]
        is_unseen = seen is None or None in seen
        is_uneven = False
        if not current:
            # The loss of a batch that was taken before its loop has ended, which would count as the same on each rank.
            infos += self._last_infos
            is_uneven = any(len(set(info.weights)) > 1 for info in infos)
        if is_unseen and (is_uneven or _weigh_differently(infos, is_whole_step)):
            warn_once(
                "data",
                "a loss was computed while the script has several batches, which have different numbers of samples on the "
                "ranks, and nobody saw from which: a model got tensors that were computed from one, or was called by a method. "
                "The loss may be weighted by the samples of another batch, or as much on each rank, so that gradients of this "
                "step are not exactly those of one process. "
                "`accelerator.backward(loss_sum, num_items=len(x))` is exact; so is drop_last=True in all loaders.",
            )
        batches = _newest_of_each([given for given in seen or () if given is not None], running)
        if not batches:
            batches = [loader.given for loader in advanced if loader.given is not None]
        if len(batches) > 1 and _weigh_differently([given.info for given in batches], is_whole_step):
            warn_once(
                "data",
                "a loss was computed from batches of two loaders, which are divided over the ranks in different ways. It is "
                "weighted by the samples of one of them, so gradients of this step are not exactly those of one process. "
                "`backward` once for each loader's loss, or drop_last=True in both loaders, is exact.",
            )
        return batches

    def of_loss(self, loss: Tensor) -> set[GivenBatch | None] | None:
        """Returns the batches from which a loss was computed, as far as models saw their tensors.

        None among them stands for outputs that were computed from tensors of an unknown batch, or of none. None in place of
        the set: no output was marked, since the loss was computed before a script had several batches.
        """
        if loss.grad_fn is None:  # it may stand for a loss
            of_storage = self._by_storage.get(loss.untyped_storage())
            return None if of_storage is None else set(of_storage)
        batches: set[GivenBatch | None] = set()
        is_marked = False
        visited: set[Any] = set()
        to_visit: list[Any] = [loss.grad_fn]
        while to_visit and len(visited) < _MOST_NODES:
            node = to_visit.pop()
            if node in visited:
                continue
            visited.add(node)
            of_node = node.metadata.get(_MARK)
            if of_node is None:
                to_visit += [earlier for earlier, _ in node.next_functions if earlier is not None]
                continue
            is_marked = True
            batches.update(of_node)
            if not of_node:
                batches.add(None)
        return batches if is_marked else None


def _metadata(tensor: Tensor) -> dict[str, Any]:
    """Returns the dictionary that autograd keeps for the node that computed a tensor; an empty one for a leaf."""
    node: Any = tensor.grad_fn  # torch's types take its `metadata` for a method
    return {} if node is None else node.metadata


def _newest_of_each(traced: Iterable[GivenBatch], running: Sequence[PreparedLoader]) -> list[GivenBatch]:
    """Returns the newest of some batches for each loader: those of loops that are over, and the others as their loops began.

    What a script keeps of earlier batches, such as the state of a recurrent network, does not weigh a loss.
    """
    newest: dict[PreparedLoader | None, GivenBatch] = {}
    for given in sorted(traced, key=lambda given: given.place()):
        newest[given.loader()] = given
    of_running = [newest.pop(loader) for loader in running if loader in newest]
    return [*newest.values(), *of_running]


def _weigh_differently(infos: Iterable[BatchInfo], is_whole_step: bool) -> bool:
    """Returns whether it matters from which of some batches a loss was computed."""
    weights = {info.weights for info in infos}
    if is_whole_step:
        return len({tuple(rows / sum(of_ranks) for rows in of_ranks) for of_ranks in weights}) > 1
    return len(weights) > 1
