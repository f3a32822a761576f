"""What `gather_for_metrics` gathers: real samples only, known from the loader that handed out the batch.

While a loader is being iterated, its `current` batch says how many rows of each rank are real. After its loop, a
structure that holds all rows of the epoch on this rank is recognised by its length, and filler (always last) is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.active import ActiveLoaders
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
        beside = [other.current for other in active.beside_top]
        if beside:
            info = _batch_of(collectives, tree, [info, *filter(None, beside)])
        # One process has nothing to gather: it only drops filler.
        if collectives.size == 1 and not objects and has_only_tensors(tree):
            return map_tensors(lambda leaf: _real_rows(leaf, info.loaded, info.real[0]), tree)
        return collectives.gather_rows(tree, info.real, info.loaded, objects)
    if not objects and tensors(tree):
        return collectives.gather(_without_filler(active.finished, tree))
    if not isinstance(tree, (list, tuple)):
        return collectives.gather_object(tree)
    # A list has one object for each row, so that the lists of all ranks become one.
    rows = _rows_of_epoch(active.finished)
    if rows is not None and len(tree) == rows.loaded:
        tree = tree[: rows.real]
    return list(chain.from_iterable(collectives.gather_object(tree)))


def _batch_of(collectives: Collectives, tree: Tree, batches: Sequence[BatchInfo]) -> BatchInfo:
    """Returns the batch to which values belong if several loaders advance together, as in `zip(first, second)`.

    Ranks: all; they communicate if one of the batches has filler.

    Raises:
        DataError: `data-interleaved`, if the numbers of rows do not tell it.
    """
    first = batches[0]
    # Without filler all rows are real, to whichever batch they belong.
    if all(batch.real == batch.loaded_by_rank for batch in batches):
        return first
    lengths = {len(tensor) for tensor in tensors(tree) if tensor.dim()}
    # Each rank knows only how many rows of filler it has itself. What fits on all ranks is the batch.
    numbers = {number for number, batch in enumerate(batches) if batch.loaded in lengths}
    for of_rank in collectives.gather_object(numbers):
        numbers &= of_rank
    matching = [batches[number] for number in sorted(numbers)]
    for other in matching[1:]:
        if matching[0].real != other.real:
            raise DataError(
                "data-interleaved",
                "it is not known to which of two loaders these values belong.",
                why="the loops over them run together, as in `zip`, and the numbers of rows do not tell them apart; of one "
                f"loader {sum(matching[0].real)} rows are no filler now, of the other {sum(other.real)}",
                fix="gather the values of each loader in a call of its own, and give the loaders different batch sizes",
            )
    if matching:
        return matching[0]
    # Values without a row for each sample: none is left out if one of the batches has samples on all ranks.
    return max(batches, key=lambda batch: sum(map(bool, batch.real)))


def _real_rows(leaf: torch.Tensor, loaded: int, real: int) -> torch.Tensor:
    """What gathering makes of one process's tensor: nothing has to be announced or sent, which would take 50 us."""
    if leaf.ndim == 0:
        return leaf.detach().reshape(1).clone()
    if loaded != real and len(leaf) == loaded:
        leaf = leaf[:real]
    return leaf.detach().clone()


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
