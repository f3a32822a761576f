"""Collective operations on nested batches and objects: one exchange for a whole structure, and never an unchecked one.

How the ranks find out that they disagree, and how bytes travel, is `exchange`'s business; here is what they mean.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world import tree as trees
from paceline.world.debug import Watch
from paceline.world.exchange import Exchange, Sent, pack, unpack
from paceline.world.mesh import Group
from paceline.world.tree import Tree
from paceline.world.world import World

Reduction = Literal["sum", "mean", "none"]


class Collectives:
    """The collective operations of one group of ranks.

    Args:
        world: who this process is.
        device: device of this process; tensors lie there or on the CPU.
        group: the ranks that take part; by default all.
        debug: check before each operation that all ranks enter the same one from the same line of the script.
        timeout_s: seconds after which `debug` calls a rank missing.

    Attributes:
        rank, size: number of this process in the group, and how many there are.

    Ranks:
        All ranks of the group call every method, in the same order. Tensors that come back are new and carry no
        gradient. Where one rank raises, all do.
    """

    def __init__(
        self,
        world: World,
        *,
        device: torch.device,
        group: Group = None,
        debug: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.world = world
        self.device = device
        self.debug = debug
        if group is None and world.size > 1:
            group = dist.group.WORLD
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._exchange: Exchange | None = None
        if self.size > 1:
            self._exchange = Exchange(group, device, Watch(group, timeout_s) if debug else None)

    # -------------------------------------------------------------------- tensors

    def gather(self, tree: Tree) -> Tree:
        """The tensors of all ranks, concatenated along dim 0 in rank order; a 0-dim tensor becomes one of [size].

        Ranks may differ in dim 0, and in nothing else.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves = self._tensors("gather", tree)
        return trees.unflatten(tree, _concatenate(leaves, self._gather("gather", tree, leaves)))

    def gather_rows(self, tree: Tree, real: Sequence[int], local: int, objects: bool = False) -> Tree:
        """Gathers what was computed from a batch, over real samples only.

        A leaf with as many rows as the batch keeps the first `real[r]` rows of each rank r. A 0-dim tensor gives one
        value, and any other tensor all its rows, for each rank that holds a real row. A list without tensors, or any
        other object, becomes one list by the same rules.

        Args:
            tree: what this rank computed from its batch.
            real: real rows of each rank, as in `BatchInfo.real`.
            local: rows that lie in this rank's batch, filler included.
            objects: take `tree` for a list of one object a row, and give one list of all.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-object`.
        """
        assert len(real) == self.size, "`real` has one entry a rank"
        op = "gather_for_metrics"
        boxed = _Box(list(tree)) if objects else tree
        leaves = trees.leaves(boxed)
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            leaves = self._tensors(op, tree)
            return trees.unflatten(tree, _concatenate(leaves, self._gather(op, tree, leaves, aux=local), real))
        boxed = boxed if objects else _box(tree)
        leaves = trees.leaves(boxed)
        sent = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._tensors(op, sent)
        sent.append(self._pickle(op, [leaf.value for leaf in leaves if isinstance(leaf, _Box)]))
        arrived = self._gather(op, boxed, sent, aux=local)
        merged = _concatenate(sent, arrived, real, whole_last=True)
        lists = _join(_unpickle_each(merged.pop(), arrived), [one.aux for one in arrived], real)
        tensors = iter(merged)
        return trees.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else next(lists), boxed)

    def reduce(self, tree: Tree, reduction: Reduction = "sum", scale: float = 1.0) -> Tree:
        """Sum or mean over the ranks of each tensor, times `scale`; "none" scales alone.

        Integers are summed as such; their mean is of torch's default float type. Every rank gets the same bits.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-reduction`.
        """
        if reduction not in ("sum", "mean", "none"):
            raise CollectiveError(
                "collective-reduction",
                f"there is no reduction called {reduction!r}.",
                fix='use "sum", "mean" or "none"',
            )
        leaves = self._tensors("reduce", tree)
        if reduction == "mean":
            leaves = [leaf.long() if leaf.dtype == torch.bool else leaf for leaf in leaves]
        if reduction == "none" or self._exchange is None:
            total = [leaf.clone() for leaf in leaves]
        else:
            total = self._sum(self._exchange, f"reduce({reduction})", tree, leaves)
        if reduction == "mean":
            total = [leaf / self.size for leaf in total]
        return trees.unflatten(tree, total if scale == 1.0 else [leaf * scale for leaf in total])

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """The tensors of rank `src` on every rank; all ranks pass the same structure, dtypes and shapes.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        op = f"broadcast(src={src})"
        leaves = self._tensors(op, tree)
        exchange = self._exchange
        if exchange is None:
            return trees.unflatten(tree, [leaf.clone() for leaf in leaves])
        on_cpu, on_device = self._places(leaves)
        detail = _detail(tree, leaves, exact=True)
        if not on_device and exchange.fits(0, _count(leaves)):
            sent = exchange.announce(op, detail, cpu=pack(leaves if self.rank == src else ()))
            data = sent[src].cpu
            assert data is not None
            return trees.unflatten(tree, unpack(data, leaves))
        exchange.announce(op, detail)
        found: dict[int, Tensor] = {}
        for places, group in ((on_cpu, exchange.cpu_group), (on_device, exchange.group)):
            if places:
                data = pack([leaves[i] for i in places])
                data = data.clone() if len(places) == 1 else data  # `pack` may have copied nothing
                dist.broadcast(data, dist.get_global_rank(group, src), group=group)
                found |= zip(places, unpack(data, [leaves[i] for i in places]), strict=True)
        return trees.unflatten(tree, [found[i] for i in range(len(leaves))])

    def pad_across(self, tree: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
        """Pads each tensor along `dim` to the largest size that any rank has there; tensors without that dim stay.

        Args:
            tree: tensors that may differ between ranks in `dim`.
            dim: the dimension, negative ones counted from the end.
            pad_index: the value to pad with.
            pad_first: put the padding before the data.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves = self._tensors("pad_across_processes", tree)
        has = [-leaf.ndim <= dim < leaf.ndim for leaf in leaves]
        sizes = [leaf.shape[dim] if there else 0 for leaf, there in zip(leaves, has, strict=True)]
        if self._exchange is not None:
            kinds = ", ".join(f"{_dtype(leaf)}, {leaf.ndim} dims" for leaf in leaves)
            arrived = self._ints("pad_across_processes", f"{trees.structure(tree)} of {kinds}", sizes)
            sizes = [max(column) for column in zip(*arrived, strict=True)]
        padded = [
            _pad(leaf, dim, size, pad_index, pad_first) if there else leaf
            for leaf, there, size in zip(leaves, has, sizes, strict=True)
        ]
        return trees.unflatten(tree, padded)

    # -------------------------------------------------------------------- objects, flags, numbers

    def gather_object(self, obj: Any) -> list[Any]:
        """Any picklable object of each rank, in rank order.

        Raises:
            CollectiveError: `collective-object`, where a rank's object cannot be pickled.
        """
        if self._exchange is None:
            return [obj]
        data = self._pickle("gather_object", obj)
        arrived = self._exchange.gather("gather_object", "", (), data)
        return [_unpickle(one.cpu) for one in arrived]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src` on every rank; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`.
        """
        exchange, op = self._exchange, f"broadcast_object(src={src})"
        if exchange is None:
            return obj
        data = self._pickle(op, obj) if self.rank == src else pack(())
        given = exchange.announce(op, "", cpu=data)[src]
        if given.cpu is None:
            given.cpu = data if self.rank == src else torch.empty(given.cpu_bytes, dtype=torch.uint8)
            dist.broadcast(given.cpu, dist.get_global_rank(exchange.cpu_group, src), group=exchange.cpu_group)
        return obj if self.rank == src else _unpickle(given.cpu)

    def barrier(self) -> None:
        """Waits until all ranks are here. Work that is queued on an accelerator is not waited for."""
        self._ints("wait_for_everyone", "", ())

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return any(one[0] for one in self._ints("any", "", (int(flag),)))

    def sum_ints(self, numbers: Sequence[int]) -> list[int]:
        """The sum over the ranks of each number; touches no accelerator.

        Raises:
            CollectiveError: `collective-mismatch`, where ranks bring different counts of numbers.
        """
        return [sum(column) for column in zip(*self._ints("sum", f"{len(numbers)} numbers", numbers), strict=True)]

    def check(self, op: str, detail: str = "") -> None:
        """In debug mode: waits until all ranks are here, and checks that they do the same from the same line.

        Raises:
            CollectiveError: `collective-diverged`, `collective-missing`, on every rank.
        """
        if self._exchange is not None and self._exchange.watch is not None:
            self._exchange.watch.check(op, detail)

    # -------------------------------------------------------------------- how

    def _tensors(self, op: str, tree: Tree) -> list[Tensor]:
        """The leaves of `tree`, detached; an error on every rank where this one has a leaf that cannot be sent."""
        leaves = trees.leaves(tree)
        kinds = ("cpu", self.device.type)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.device.type not in kinds:
                break
            if leaf.is_quantized or hasattr(leaf, "full_tensor"):
                break
        else:
            return [leaf.detach() for leaf in leaves]
        bad = [
            f"{path or 'the value'} is {_kind(leaf)}" for path, leaf in trees.walk(tree) if not _sendable(leaf, kinds)
        ]
        if self._exchange is not None:
            # The other ranks are on their way into the exchange: they must hear of it too.
            self._exchange.announce(op, "cannot: " + "; ".join(bad))
        raise CollectiveError(
            "collective-leaf",
            f"{op} takes dense tensors on {' or '.join(sorted(set(kinds)))}, in any nesting, and nothing else.",
            why=bad,
            fix="use gather_object (or gather_for_metrics) for other objects; `.full_tensor()` for a DTensor",
        )

    def _gather(self, op: str, tree: Tree, leaves: list[Tensor], aux: int = 0) -> list[Sent]:
        rows = [leaf.shape[0] if leaf.ndim else -1 for leaf in leaves]
        on_cpu, on_device = self._places(leaves)
        cpu = pack([leaves[i] for i in on_cpu] if on_device else leaves)
        device = pack([leaves[i] for i in on_device]) if on_device else None
        if self._exchange is None:
            return [Sent(aux, cpu.numel(), 0, rows, cpu, device)]
        return self._exchange.gather(op, _detail(tree, leaves), rows, cpu, device, aux)

    def _places(self, leaves: list[Tensor]) -> tuple[list[int], list[int]]:
        """Which leaves travel over the CPU, and which on the device."""
        if self.device.type == "cpu":
            return list(range(len(leaves))), []
        on_device = [i for i, leaf in enumerate(leaves) if leaf.device.type != "cpu"]
        return [i for i, leaf in enumerate(leaves) if leaf.device.type == "cpu"], on_device

    def _sum(self, exchange: Exchange, op: str, tree: Tree, leaves: list[Tensor]) -> list[Tensor]:
        detail = _detail(tree, leaves, exact=True)
        if all(leaf.device.type == "cpu" for leaf in leaves) and exchange.fits(0, _count(leaves)):
            arrived = exchange.announce(op, detail, cpu=pack(leaves))
            stacked = _concatenate([leaf.unsqueeze(0) for leaf in leaves], _with_rows(arrived, len(leaves)))
            return [leaf.sum(0, dtype=leaf.dtype) for leaf in stacked]
        exchange.announce(op, detail)
        found: dict[int, Tensor] = {}
        kinds = [(leaf.device.type, leaf.dtype) for leaf in leaves]
        for kind in dict.fromkeys(kinds):
            places = [i for i, other in enumerate(kinds) if other == kind]
            flat = torch.cat([leaves[i].reshape(-1) for i in places])
            dist.all_reduce(flat, group=exchange.cpu_group if kind[0] == "cpu" else exchange.group)
            parts = torch.split(flat, [leaves[i].numel() for i in places])
            found |= {i: part.view(leaves[i].shape) for i, part in zip(places, parts, strict=True)}
        return [found[i] for i in range(len(leaves))]

    def _ints(self, op: str, detail: str, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of each rank; they travel where a message has the rows of leaves."""
        if self._exchange is None:
            return [numbers]
        return [one.rows for one in self._exchange.gather(op, detail, numbers, pack(()))]

    def _pickle(self, op: str, obj: Any) -> Tensor:
        try:
            return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            if self._exchange is not None:
                self._exchange.announce(op, f"cannot: {error}")
            raise CollectiveError(
                "collective-object",
                f"{op}: an object of type {type(obj).__name__} cannot be sent to other processes.",
                why=f"pickle says: {error}",
                fix="send plain data: numbers, strings, tensors, lists and dicts of them",
            ) from error


@dataclass(frozen=True)
class _Box:
    """Objects that are gathered by pickle: a list of one object a row, or a single object."""

    value: Any

    def to(self, *_: Any) -> _Box:  # having it, `tree` takes a box for a leaf
        return self


def _box(tree: Tree) -> Tree:
    """`tree` with each list that holds no tensor, and each other leaf that is none, in a box."""
    if isinstance(tree, Tensor):
        return tree
    children = trees.children(tree)
    rows = isinstance(tree, list | tuple) and not hasattr(tree, "_fields") and not trees.tensors(tree)
    if children is None or rows:
        return _Box(tree)
    return trees.rebuild(tree, [_box(child) for child in children])


def _concatenate(
    leaves: Sequence[Tensor], arrived: Sequence[Sent], real: Sequence[int] | None = None, whole_last: bool = False
) -> list[Tensor]:
    """Each leaf of all ranks, joined along dim 0.

    Args:
        leaves: this rank's, for dtypes and the sizes of other dims.
        arrived: what each rank sent, its `aux` being the rows of its batch.
        real: how many of these are real; None keeps all.
        whole_last: whether the last leaf is kept whole all the same.
    """
    starts = {"cpu": [0] * len(arrived), "device": [0] * len(arrived)}
    joined = []
    for number, leaf in enumerate(leaves):
        place = "cpu" if leaf.device.type == "cpu" else "device"
        start = starts[place]
        shape = leaf.shape[1:]
        row_bytes = shape.numel() * leaf.element_size()
        trim = real if not (whole_last and number == len(leaves) - 1) else None
        batch = trim is not None and leaf.ndim > 0 and all(one.rows[number] == one.aux for one in arrived)
        parts, total = [], 0
        for rank, one in enumerate(arrived):
            rows = abs(one.rows[number])  # -1 says 0-dim: one row
            kept = rows if trim is None else min(rows, trim[rank]) if batch else rows if trim[rank] else 0
            begin = start[rank]
            start[rank] = begin + rows * row_bytes
            total += kept
            if kept:
                data = one.cpu if place == "cpu" else one.device
                assert data is not None
                parts.append(data[begin : begin + kept * row_bytes])
        data = torch.cat(parts) if parts else leaf.new_empty(0, dtype=torch.uint8)
        joined.append(data.view(leaf.dtype).view(total, *shape))
    return joined


def _join(boxes: list[list[Any]], loaded: Sequence[int], real: Sequence[int]) -> Iterator[list[Any]]:
    """For each box the objects of all ranks in one list, by the rules of `gather_rows`."""
    for column in zip(*boxes, strict=True):
        lists = all(isinstance(value, list | tuple) for value in column)
        batch = lists and all(len(value) == rows for value, rows in zip(column, loaded, strict=True))
        merged: list[Any] = []
        for value, kept in zip(column, real, strict=True):
            if batch:
                merged += value[:kept]
            elif kept:
                merged += value if lists else [value]
        yield merged


def _unpickle_each(data: Tensor, arrived: Sequence[Sent]) -> list[Any]:
    return [_unpickle(part) for part in torch.split(data, [one.rows[-1] for one in arrived])]


def _unpickle(data: Tensor | None) -> Any:
    assert data is not None
    return pickle.loads(data.numpy().tobytes())  # from ranks of this very run


def _with_rows(arrived: list[Sent], leaves: int) -> list[Sent]:
    for one in arrived:
        one.rows = (1,) * leaves
    return arrived


def _pad(leaf: Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> Tensor:
    have = leaf.shape[dim]
    if have == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    padded.narrow(dim, size - have if pad_first else 0, have).copy_(leaf)
    return padded


def _detail(tree: Tree, leaves: list[Tensor], exact: bool = False) -> str:
    """What must agree between ranks, as text: structure, dtypes, shapes (dim 0 only where `exact`), kind of device."""
    parts = []
    for leaf in leaves:
        shape = list(leaf.shape) if exact or not leaf.ndim else ["*", *leaf.shape[1:]]
        place = "" if leaf.device.type == "cpu" else f"@{leaf.device.type}"
        parts.append(f"{_dtype(leaf)}{shape}{place}".replace("'", ""))
    return f"{trees.structure(tree)} of {', '.join(parts)}"


def _count(leaves: Sequence[Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _dtype(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _sendable(leaf: Any, kinds: Sequence[str]) -> bool:
    dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized
    return dense and leaf.device.type in kinds and not hasattr(leaf, "full_tensor")


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {type(leaf).__name__} ({_dtype(leaf)}, {leaf.layout}, on {leaf.device})"
