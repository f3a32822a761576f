"""What `gather_for_metrics` gathers: real samples only, known from the loader that handed out the batch.

While a loader is being iterated, its `current` batch says how many rows of each rank are real. After its loop, a
structure that holds all rows of the epoch on this rank is recognised by its length, and filler (always last) is dropped.
"""

from __future__ import annotations

from typing import Any

from paceline.world.tree import map_tensors


def gather_rows(active: Any, collectives: Any, tree: Any) -> Any:
    """Tensors of all ranks over real rows, in sample order. Ranks: all.

    Args:
        active: the `ActiveLoaders` of the run.
        collectives: the `Collectives` of the run.
        tree: any nesting of tensors; dim 0 of each is this rank's rows, or it is 0-dim.
    """
    loader = active.top
    if loader is not None and loader.current is not None:
        info = loader.current
        return collectives.gather_rows(tree, info.real, info.loaded)
    return collectives.gather(_without_filler(active.finished, tree))


def gather_objects(active: Any, collectives: Any, value: Any) -> Any:
    """Objects of all ranks: lists are joined, without the entries of filler rows; anything else makes a list. Ranks: all."""
    loader = active.top
    info = loader.current if loader is not None else None
    if isinstance(value, (list, tuple)):
        real = list(value)
        if info is not None and len(real) == info.loaded:
            real = real[: info.real[info.index]]
        return [entry for part in collectives.gather_object(real) for entry in part]
    found = collectives.gather_object(value)
    if info is not None:  # a value of a batch that holds no real sample is no value
        found = [entry for entry, rows in zip(found, info.real, strict=False) if rows] or found
    return found


def _without_filler(finished: Any, tree: Any) -> Any:
    """Drops filler from structures that hold every row of the epoch that has just ended."""
    rows = getattr(finished, "epoch_rows", None)
    if rows is None or rows.loaded == rows.real:
        return tree
    return map_tensors(lambda t: t[: rows.real] if t.dim() and len(t) == rows.loaded else t, tree)
