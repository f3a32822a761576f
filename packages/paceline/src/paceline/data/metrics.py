"""What `gather_for_metrics` gathers: real samples only, known from the loader that handed out the batch.

While a loader is being iterated, its `current` batch says how many rows of each rank are real. After its loop, a
structure that holds all rows of the epoch on this rank is recognised by its length, and filler (always last) is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.active import ActiveLoaders
from paceline.world.arrived import RowCounts
from paceline.world.collectives import Collectives
from paceline.world.tree import Tree, has_only_tensors, map_tensors, tensors

if TYPE_CHECKING:
    from paceline.data.loader import EpochRows, PreparedLoader
    from paceline.plan.data import BatchInfo


def gather_for_metrics(active: ActiveLoaders, collectives: Collectives, tree: Tree, objects: bool = False) -> Tree:
    """Values of all ranks over real rows, in sample order. Ranks: all; all get the result.

    Args:
        active: the run's loaders.
        collectives: the run's collectives.
        tree: any nesting of tensors whose dim 0 is this rank's rows, 0-dim tensors, and objects.
        objects: takes `tree` for a list of one object a row.

    Shape:
        A tensor [rows of this rank's batch, ...] gives [real rows of all ranks, ...]; one of no dims, one value a rank.

    Raises:
        DataError: `data-interleaved`.
    """
    info = active.gathered(tree)
    if info is not None:
        together = [info]
        for loader in active.beside_top:
            if loader.current is not None:
                together.append(loader.current)
        # One process has nothing to gather: it only drops filler.
        if collectives.size == 1 and not objects and has_only_tensors(tree):
            counts = _counts_of(active, together, [(len(leaf) if leaf.ndim else -1,) for leaf in tensors(tree)])
            return map_tensors(lambda leaf: _real_rows(leaf, counts), tree)
        return collectives.gather_rows(tree, partial(_counts_of, active, together), objects)
    if not objects and tensors(tree):
        return collectives.gather(_without_filler(active.finished, tree))
    if not isinstance(tree, (list, tuple)):
        return collectives.gather_object(tree)
    # A list has one object for each row, so that the lists of all ranks become one.
    rows = _rows_of_epoch(active.finished)
    if rows is not None and len(tree) == rows.loaded:
        tree = tree[: rows.real]
    return list(chain.from_iterable(collectives.gather_object(tree)))


def _counts_of(active: ActiveLoaders, together: Sequence[BatchInfo], rows: Sequence[Sequence[int]]) -> RowCounts:
    """Returns the rows of the batch to which values belong: one of which all ranks have as many rows in some value.

    Args:
        active: the run's loaders; earlier batches count if no present one fits.
        together: the present batch, and those of the loops that advance together with it.
        rows: of each value, on each rank.

    Raises:
        DataError: `data-interleaved`, if the numbers of rows do not tell two batches apart that were taken together.
    """
    present = [info.rows for info in together]
    fitting = [counts for counts in present if any(map(counts.are_those_of, rows))]
    for other in fitting[1:]:
        if fitting[0].real != other.real:
            raise DataError(
                "data-interleaved",
                "it is not known to which of two loaders these values belong.",
                why="the loops over them run together, as in `zip`, and the numbers of rows do not tell them apart; of one "
                f"loader {sum(fitting[0].real)} rows are no filler now, of the other {sum(other.real)}",
                fix="gather the values of each loader in a call of its own, and give the loaders different batch sizes",
            )
    if fitting:
        return fitting[0]
    for info in active.earlier():
        if any(map(info.rows.are_those_of, rows)):
            return info.rows
    # Values without a row for each sample: none is left out if one of the batches has samples on all ranks.
    return max(present, key=lambda counts: sum(map(bool, counts.real)))


def _real_rows(leaf: torch.Tensor, counts: RowCounts) -> torch.Tensor:
    """What gathering makes of one process's tensor: nothing has to be announced or sent, which would take 50 us."""
    if leaf.ndim == 0:
        return leaf.detach().reshape(1).clone()
    (num_kept,) = counts.num_kept([len(leaf)])
    return leaf[:num_kept].detach().clone()


def _without_filler(finished: PreparedLoader | None, tree: Tree) -> Tree:
    """Drops filler from structures that hold every row of the epoch that has just ended."""
    rows = _rows_of_epoch(finished)
    if rows is None:
        return tree

    def real_rows(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor of another length, such as a mean over the epoch, has no row for each sample.
        if tensor.dim() == 0 or len(tensor) != rows.loaded:
            return tensor
        return tensor[: rows.real]

    return map_tensors(real_rows, tree)


def _rows_of_epoch(finished: PreparedLoader | None) -> EpochRows | None:
    """Returns how many rows this rank has read in the epoch that has just ended; None if none of them is filler."""
    rows = None if finished is None else finished.epoch_rows
    if rows is None or rows.loaded == rows.real:
        return None
    return rows


def tell_of_repeats(num_parts: int, num_ranks: int) -> None:
    """Warns that a sum over all ranks counts samples several times, where some ranks read the same ones.

    Args:
        num_parts: the number of parts into which samples are divided.
        num_ranks: the number of ranks.
    """
    repeats = num_ranks // num_parts
    warn_once(
        "data",
        f"`accelerator.reduce(..., 'sum')` adds what all {num_ranks} processes have, and {repeats} of them each read the same "
        f"samples under this plan (along tp, pp and cp). A number of samples, or a sum over them, is {repeats} times as large "
        f"as on one process. Divide it by {repeats}, or add what `accelerator.gather_for_metrics` returns. Quotients of two "
        "such sums are right.",
    )
