"""`BatchPeers`: ranks that read different samples of one batch, and layers whose `forward` must see the samples of all of them.

Such a layer keeps its class and its own `forward`. Only its calls of `torch.nn.functional` are replaced, by functions that
communicate (`ReplacedCalls`). `batch_norm.py` and `batch_layers.py` are built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.strategy import AppliedStrategy

PEERS = "_batch_peers"  # attribute of a layer that sees the batches of several ranks: its `BatchPeers`


@dataclass
class BatchPeers:
    """The ranks whose batches a layer sees.

    Attributes:
        group: their process group.
        ranks: their number.
        idle: returns whether this rank's rows are filler: at the end of an epoch there may be fewer samples than ranks.
        paused: the number of open contexts in which each rank sees its own batch alone.
    """

    group: dist.ProcessGroup
    ranks: int
    idle: Callable[[], bool]
    paused: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a copy of a layer, such as an average of weights, must not wait for other ranks."""


class SharedBatches(AppliedStrategy):
    """A model with layers that see the batches of several ranks, which are their `peers`."""

    def __init__(self, model: nn.Module, peers: Sequence[BatchPeers]) -> None:
        super().__init__(model)
        self._peers = peers

    @contextmanager
    def uneven_steps(self) -> Iterator[None]:
        """While it is open, each rank sees its own batch alone, and changes no weight by it."""
        for peers in self._peers:
            peers.paused += 1
        try:
            yield
        finally:
            for peers in self._peers:
                peers.paused -= 1


class ReplacedCalls(TorchFunctionMode):
    """While it is open, replaces calls of functions of `torch.nn.functional`.

    Args:
        replacements: by the function that they replace; each is called with `first` and the arguments of the call.
        first: the first argument of each replacement.
    """

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]], first: object) -> None:
        super().__init__()
        self._replacements = replacements
        self._first = first

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._replacements.get(func)
        if replacement is not None:
            return replacement(self._first, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
