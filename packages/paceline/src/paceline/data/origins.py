"""`Origins`: from which loader's batch a loss was computed, where loops over several loaders run at the same time.

    remember     a loader yields a batch                   the storages of its tensors get the loader
    begin        a prepared model is called with them      `inputs` are the loaders
    mark         it has returned                           the nodes and the storages of its outputs get the loaders
    of_loss      a backward pass begins                    the graph is walked from the loss to the first marked nodes

Nothing of this happens before two loops run at the same time. A batch that is copied before the model sees it is not
recognised: the outputs that were computed from it are marked with no loader. What is not marked at all was computed before.
A detached output is recognised, since it shares the storage.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.world.tree import tensors

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from paceline.data.loader import PreparedLoader

    Loaders = frozenset[weakref.ref[PreparedLoader]]

_MARK = "paceline.loaders"  # in the metadata of a node
_MOST_NODES = 20_000  # between a loss and the outputs of models there are few


class Origins:
    """The batches of loops that run at the same time, and the outputs that were computed from them.

    Attributes:
        inputs: the loaders from whose batches the inputs come of the prepared model that was called last, as far as is known.
    """

    def __init__(self) -> None:
        # The loaders of each storage: of a batch, and of outputs that were computed from it.
        self._by_storage: MutableMapping[torch.UntypedStorage, Loaders] = WeakIdKeyDictionary()
        # What `_of` has returned for the inputs of a model that is being called.
        self._called: MutableMapping[nn.Module, tuple[Loaders, bool]] = weakref.WeakKeyDictionary()
        self.inputs: weakref.WeakSet[PreparedLoader] = weakref.WeakSet()

    def remember(self, loader: PreparedLoader, batch: object) -> None:
        """Records the storages of the tensors of the batch that a loader yields."""
        for tensor in tensors(batch):
            storage = tensor.untyped_storage()
            # Views of one tensor may be batches of several loaders.
            self._by_storage[storage] = self._by_storage.get(storage, frozenset()) | {weakref.ref(loader)}

    def watch(self, model: nn.Module) -> None:
        """Registers the hooks that see the inputs of a prepared model and mark its outputs."""
        # A function with a weak reference: a copy of the model copies its hooks.
        origins = weakref.ref(self)

        def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            tracker = origins()
            if tracker is None or torch.compiler.is_compiling():
                return
            references, is_older = tracker._of((args, kwargs))
            tracker._called[module] = (references, is_older)
            loaders = [reference() for reference in references]
            tracker.inputs = weakref.WeakSet(loader for loader in loaders if loader is not None)

        def mark(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            tracker = origins()
            if tracker is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return
            references, is_older = tracker._called.pop(module, (frozenset(), True))
            tracker._mark(references, is_older, output)

        # Before the hooks of strategies, which may copy the inputs: FSDP2 converts them to half precision.
        model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(mark)

    def _of(self, inputs: object) -> tuple[Loaders, bool]:
        """Returns the loaders of some inputs, and whether one was computed before outputs were marked."""
        loaders: Loaders = frozenset()
        is_older = False
        for tensor in tensors(inputs):
            # The output of another model, such as the generator of a GAN, comes from that model's inputs.
            of_node = _metadata(tensor).get(_MARK)
            of_storage = self._by_storage.get(tensor.untyped_storage())
            loaders |= of_node or frozenset()
            loaders |= of_storage or frozenset()
            if tensor.requires_grad and of_node is None and of_storage is None:
                is_older = True
        return loaders, is_older

    def _mark(self, loaders: Loaders, is_older: bool, output: object) -> None:
        """Marks the nodes and the storages of the outputs with the loaders of the inputs; see `_of`."""
        if is_older and not loaders:
            return
        for tensor in tensors(output):
            _metadata(tensor)[_MARK] = loaders
            self._by_storage[tensor.untyped_storage()] = loaders

    def of_loss(self, loss: Tensor) -> set[PreparedLoader | None] | None:
        """Returns the loaders from whose batches a loss was computed, as far as models saw their tensors.

        None among them stands for outputs that were computed from tensors of an unknown loader, or of none. None in place of
        the set: no output was marked, since the loss was computed before two loops ran at the same time.
        """
        loaders: set[PreparedLoader | None] = set()
        is_marked = False
        visited: set[Any] = set()
        to_visit: list[Any] = []
        if loss.grad_fn is not None:
            to_visit.append(loss.grad_fn)
        while to_visit and len(visited) < _MOST_NODES:
            node = to_visit.pop()
            if node in visited:
                continue
            visited.add(node)
            references = node.metadata.get(_MARK)
            if references is None:
                to_visit += [earlier for earlier, _ in node.next_functions if earlier is not None]
                continue
            is_marked = True
            loaders.update(reference() for reference in references)
            if not references:
                loaders.add(None)
        return loaders if is_marked else None


def _metadata(tensor: Tensor) -> dict[str, Any]:
    """Returns the dictionary that autograd keeps for the node that computed a tensor; an empty one for a leaf."""
    node: Any = tensor.grad_fn  # torch's types take its `metadata` for a method
    return {} if node is None else node.metadata
