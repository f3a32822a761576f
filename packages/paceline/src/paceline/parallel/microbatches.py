"""`Microbatches`: the micro-batches of one step, each as its loader gave it.

A plan divides a batch into micro-batches where it needs some. Who has them already (another library's loop pulls one
after the other) passes them together, and they run as they are: shapes may differ, and each counts the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Microbatches(tuple[Any, ...]):
    """Batches for one `Accelerator.forward_backward`, each in one of the forms that it takes."""

    def __new__(cls, batches: Iterable[Any]) -> Microbatches:
        return super().__new__(cls, batches)


class BatchPart(NamedTuple):
    """One batch: what the model and the loss are called with."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    target: Any

    @classmethod
    def of(cls, batch: Any) -> BatchPart:
        """Reads `(*inputs, target)`, or a mapping, which is both."""
        if isinstance(batch, Mapping):
            return cls((), dict(batch), batch)
        *first, target = batch
        return cls(tuple(first), {}, target)
