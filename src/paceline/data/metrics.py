"""What `gather_for_metrics` gathers: real samples only, known from the loader that handed out the batch.

While a loader is being iterated, its `current` batch says how many rows of each rank are real. After its loop, a
structure that holds all rows of the epoch on this rank is recognised by its length, and filler (always last) is dropped.
"""

from __future__ import annotations

from typing import Any

from paceline.data.active import ActiveLoaders
from paceline.world.collectives import Collectives
from paceline.world.tree import map_tensors, tensors


def gather_for_metrics(active: ActiveLoaders, collectives: Collectives, tree: Any, objects: bool = False) -> Any:
    """Values of all ranks over real rows, in sample order. Ranks: all; all get the result.

    Args:
        active: the run's loaders.
        collectives: the run's collectives.
        tree: any nesting of tensors whose dim 0 is this rank's rows, 0-dim tensors, and objects.
        objects: takes `tree` for a list of one object a row.
    """
    loader = active.top
    if loader is not None and loader.current is not None:
        info = loader.current
        return collectives.gather_rows(tree, info.real, info.loaded, objects)
    if not objects and tensors(tree):
        return collectives.gather(_without_filler(active.finished, tree))
    found = collectives.gather_object(tree)
    return [entry for part in found for entry in part] if isinstance(tree, (list, tuple)) else found


def _without_filler(finished: Any, tree: Any) -> Any:
    """Drops filler from structures that hold every row of the epoch that has just ended."""
    rows = getattr(finished, "epoch_rows", None)
    if rows is None or rows.loaded == rows.real:
        return tree
    return map_tensors(lambda t: t[: rows.real] if t.dim() and len(t) == rows.loaded else t, tree)
