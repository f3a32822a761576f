"""`StructureOperations`: collective operations on nested structures of tensors; `Collectives` has them, and says what they do.

The leaves of a structure become bytes, which travel in one exchange, and come back as tensors. One process goes the same way,
without the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world import tree as trees
from paceline.world.arrived import Arrived, ByteLayout, CountsOf, RankPayload, RowCounts, as_bytes, unpickled
from paceline.world.form import Form, Forms, described, dtype_name
from paceline.world.received import concatenate, real_rows, tensors_from
from paceline.world.tree import Tree

if TYPE_CHECKING:
    from paceline.world.exchange import Exchange


class _Ranks(Protocol):
    """What is used of `Collectives`."""

    size: int
    rank: int
    device: torch.device

    def decline(self, op: str, why: str) -> None: ...

    def combine(
        self, op: str, detail: str, numbers: Sequence[int], combination: Literal["sum", "max"]
    ) -> list[int]: ...

    def pickled(self, op: str, obj: object) -> Tensor: ...


class StructureOperations:
    """The operations of one group of ranks. Arguments, results and errors are those of the methods of `Collectives`.

    Args:
        ranks: the group.
        exchange: sends their bytes; None for one process.
    """

    def __init__(self, ranks: _Ranks, exchange: Exchange | None) -> None:
        self._ranks = ranks
        self._exchange = exchange
        self._forms = Forms(ranks.device)

    def gather(self, tree: Tree) -> Tree:
        """See `Collectives.gather`."""
        leaves, form = self._form("gather", tree)
        return trees.unflatten(tree, concatenate(leaves, form, self._gather(leaves, form)))

    def gather_rows(self, tree: Tree, counts_of: CountsOf, objects: bool = False) -> Tree:
        """See `Collectives.gather_rows`."""
        op = "gather_for_metrics"
        if not objects and trees.has_only_tensors(tree):
            leaves, form = self._form(op, tree)
            arrived = self._gather(leaves, form)
            counts = counts_of([arrived.rows_of(number) for number in range(len(leaves))])
            gathered = concatenate(leaves, form, arrived)
            return trees.unflatten(tree, real_rows(gathered, arrived, counts))
        # The objects of all leaves travel as one tensor of bytes, after the tensors.
        boxed = _Box(list(tree)) if objects else _box(tree)
        boxes = [leaf.value for leaf in trees.leaves(boxed) if isinstance(leaf, _Box)]
        leaves = [*trees.tensors(boxed), self._ranks.pickled(op, boxes)]
        _, form = self._form(f"{op} {trees.structure(boxed)}", leaves)
        # Pickles seldom have the same size on each rank, so the ranks exchange their sizes without trying to agree first.
        arrived = self._gather(leaves, form, uneven=True)
        *gathered, pickles = concatenate(leaves, form, arrived)
        boxes_by_rank = [unpickled(data) for data in torch.split(pickles, arrived.rows_of(-1))]
        rows = [arrived.rows_of(number) for number in range(len(gathered))]
        counts = counts_of([*rows, *_lengths(boxes_by_rank)])
        lists = _join(boxes_by_rank, counts)
        merged = iter(real_rows(gathered, arrived, counts))

        def next_real(leaf: object) -> Any:
            return next(merged) if isinstance(leaf, Tensor) else next(lists)

        return trees.map_leaves(next_real, boxed)

    def reduce(self, tree: Tree, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> Tree:
        """See `Collectives.reduce`."""
        if reduction not in ("sum", "mean", "none"):
            raise CollectiveError(
                "collective-reduction",
                f"there is no reduction called {reduction!r}.",
                fix='use "sum", "mean" or "none"',
            )
        leaves, form = self._form(f"reduce({reduction})", tree, exact=True)
        with torch.no_grad():
            if reduction == "mean":
                # A sum of bools is a bool ("any of them"), so they are counted as integers.
                for number, leaf in enumerate(leaves):
                    if leaf.dtype == torch.bool:
                        leaves[number] = leaf.long()
            if reduction == "none" or self._exchange is None:
                total = [leaf.clone() for leaf in leaves]
            elif not form.on_device and self._exchange.fits(0, sum(leaf.nbytes for leaf in leaves)):
                total = self._sum_of_gathered(self._exchange, leaves, form)
            else:
                total = self._all_reduce(self._exchange, leaves, form)
            if reduction == "mean":
                total = [leaf / self._ranks.size for leaf in total]
            if scale != 1.0:
                total = [leaf * scale for leaf in total]
            return trees.unflatten(tree, total)

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """See `Collectives.broadcast`."""
        leaves, form = self._form(f"broadcast(src={src})", tree, exact=True)
        exchange = self._exchange
        if exchange is None:
            return trees.unflatten(tree, [leaf.detach().clone() for leaf in leaves])
        with torch.no_grad():
            parts = [as_bytes(leaf) for leaf in leaves]
            num_bytes = sum(part.numel() for part in parts)
            if not form.on_device and exchange.fits(0, num_bytes):
                own_parts = parts if self._ranks.rank == src else ()
                arrived = exchange.announce(form.topic, own_parts)
                return trees.unflatten(tree, tensors_from(arrived.bytes_of(src), leaves))
            exchange.agree(form.topic)
            received = list(leaves)
            # The leaves of each device travel as one tensor of bytes: one collective instead of one for each leaf.
            for places, group in ((form.on_cpu, exchange.cpu_group), (form.on_device, exchange.group)):
                if not places:
                    continue
                data = torch.cat([parts[i] for i in places])
                source = dist.get_global_rank(group, src)
                exchange.communicate(form.topic.op, dist.broadcast, data, source, group=group)
                tensors = tensors_from(data, [leaves[i] for i in places])
                for place, tensor in zip(places, tensors, strict=True):
                    received[place] = tensor
            return trees.unflatten(tree, received)

    def pad_across(self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """See `Collectives.pad_across`."""
        leaves, _ = self._form("pad_across_processes", tree)
        leaves = [leaf.to(_padded_dtype(leaf, pad_index)) for leaf in leaves]
        sizes = [_size_at(leaf, dim) for leaf in leaves]
        # The ranks compare dtypes and numbers of dims, but no sizes: these may differ.
        kinds = ", ".join(f"{dtype_name(leaf)}, {leaf.ndim} dims" for leaf in leaves)
        largest = self._ranks.combine("pad_across_processes", described(tree, kinds), sizes, "max")
        padded = [_pad(leaf, dim, size, pad_index, pad_first) for leaf, size in zip(leaves, largest, strict=True)]
        return trees.unflatten(tree, padded)

    def _form(self, op: str, tree: Tree, exact: bool = False) -> tuple[list[Tensor], Form]:
        """Returns the leaves of `tree`, which must all be tensors, and the form that the ranks compare."""
        leaves, form, problems = self._forms.of(op, tree, exact)
        if form is not None:
            return leaves, form
        # Without this the other ranks would wait in the exchange until their timeout.
        self._ranks.decline(op, "; ".join(problems))
        raise CollectiveError(
            "collective-leaf",
            f"{op} takes dense tensors on the CPU or the rank's own device, in any nesting, and nothing else.",
            why=problems,
            fix="use gather_object (or gather_for_metrics) for other objects; `.full_tensor()` for a DTensor",
        )

    def _gather(self, leaves: list[Tensor], form: Form, uneven: bool = False) -> Arrived:
        """Sends the bytes of all leaves to all ranks.

        Args:
            leaves, form: as `_form` has returned them.
            uneven: whether the sizes of the leaves probably differ between ranks.
        """
        # The numbers of rows travel with the bytes; -1 stands for a tensor without dims.
        rows_of_leaves = [leaf.shape[0] if leaf.ndim else -1 for leaf in leaves]
        with torch.no_grad():
            on_cpu = [as_bytes(leaves[place]) for place in form.on_cpu]
            on_device = [as_bytes(leaves[place]) for place in form.on_device]
            if self._exchange is None:
                return _arrived_alone(rows_of_leaves, on_cpu, on_device)
            return self._exchange.gather(form.topic, rows_of_leaves, on_cpu, on_device, uneven)

    def _sum_of_gathered(self, exchange: Exchange, leaves: list[Tensor], form: Form) -> list[Tensor]:
        """Sums small tensors: they travel inside the message, and each rank adds them up in the same order."""
        parts = [as_bytes(leaf) for leaf in leaves]
        arrived = exchange.gather(form.topic, (1,) * len(leaves), parts)
        stacked = concatenate([leaf.unsqueeze(0) for leaf in leaves], form, arrived)
        # `dtype` is given because `sum` turns small integers into int64, which an all-reduce does not.
        return [leaf.sum(0, dtype=leaf.dtype) for leaf in stacked]

    def _all_reduce(self, exchange: Exchange, leaves: list[Tensor], form: Form) -> list[Tensor]:
        """Sums tensors by one all-reduce for all leaves of the same device and dtype."""
        exchange.agree(form.topic)
        places_by_kind: dict[tuple[bool, torch.dtype], list[int]] = {}
        for place, leaf in enumerate(leaves):
            places_by_kind.setdefault((place in form.on_device, leaf.dtype), []).append(place)
        total = list(leaves)
        for (on_device, _), places in places_by_kind.items():
            flat = torch.cat([leaves[place].reshape(-1) for place in places])
            group = exchange.group if on_device else exchange.cpu_group
            exchange.communicate(form.topic.op, dist.all_reduce, flat, group=group)
            sums = torch.split(flat, [leaves[place].numel() for place in places])
            for place, part in zip(places, sums, strict=True):
                total[place] = part.view(leaves[place].shape)
        return total


def _arrived_alone(rows: Sequence[int], on_cpu: list[Tensor], on_device: list[Tensor]) -> Arrived:
    """Returns the bytes of a single process in the form in which an exchange returns those of several."""
    # The empty tensor lets `torch.cat` work where no leaf lies on the CPU.
    no_bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
    cpu_bytes = torch.cat([no_bytes, *on_cpu])
    device_place = ByteLayout(torch.cat(on_device), [0]) if on_device else None
    sent = RankPayload(rows, cpu_bytes.numel())
    return Arrived([sent], alike=True, cpu=ByteLayout(cpu_bytes, [0]), device=device_place)


@dataclass(frozen=True)
class _Box:
    """Objects that are gathered by pickle: a list of one object a row, or a single object."""

    value: Any

    def to(self, *_: object) -> _Box:
        """Does nothing. `tree` takes objects that have such a method for leaves, and a box must be one."""
        return self


def _box(tree: Tree) -> Tree:
    """Returns `tree` with a box around each list without tensors, and around each other leaf that is no tensor."""
    if isinstance(tree, Tensor):
        return tree
    children = trees.children(tree)
    is_list_of_objects = isinstance(tree, list | tuple) and not hasattr(tree, "_fields") and not trees.tensors(tree)
    if children is None or is_list_of_objects:
        return _Box(tree)
    return trees.rebuild(tree, [_box(child) for child in children])


def _lengths(boxes: list[list[Any]]) -> list[list[int]]:
    """Returns the length of each box on each rank, -1 for what is no list."""
    lengths = []
    for values in zip(*boxes, strict=True):
        lengths.append([len(value) if isinstance(value, list | tuple) else -1 for value in values])
    return lengths


def _join(boxes: list[list[Any]], counts: RowCounts) -> Iterator[list[Any]]:
    """Yields for each box one list with the objects of all ranks, by the rules of `gather_rows`.

    Args:
        boxes: the values of the boxes, for each rank.
        counts: the rows of the batch.
    """
    for values, lengths in zip(zip(*boxes, strict=True), _lengths(boxes), strict=True):
        merged: list[Any] = []
        for value, num_kept in zip(values, counts.num_kept(lengths), strict=True):
            if min(lengths) >= 0:
                merged += value[:num_kept]
            elif num_kept:
                merged.append(value)
        yield merged


def _size_at(leaf: Tensor, dim: int) -> int:
    """Returns the size of `dim`; 0 for a tensor without that dim, on every rank alike, so that `_pad` leaves it as it is."""
    return leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else 0


def _padded_dtype(leaf: Tensor, pad_index: float) -> torch.dtype:
    if leaf.dtype == torch.bool:
        can_hold = pad_index in (0, 1)
    else:
        can_hold = leaf.is_floating_point() or leaf.is_complex() or pad_index % 1 == 0
    return leaf.dtype if can_hold else torch.result_type(leaf, pad_index)


def _pad(leaf: Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> Tensor:
    own_size = _size_at(leaf, dim)
    if own_size == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    start = size - own_size if pad_first else 0
    padded.narrow(dim, start, own_size).copy_(leaf)
    return padded
