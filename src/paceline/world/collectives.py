"""Collective operations on nested batches and objects: one exchange for a whole structure, and never an unchecked one.

How the ranks find out that they disagree, and how bytes travel, is `exchange`'s business; here is what they mean.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world import hangs
from paceline.world import tree as trees
from paceline.world.debug import Watch
from paceline.world.exchange import Arrived, Exchange, Sent, Topic, as_bytes
from paceline.world.failures import communicate
from paceline.world.form import Form, Forms, dtype_name
from paceline.world.mesh import Group, apart
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
        hang_report_s: seconds after which a rank that waits is reported, in the whole process; 0 for never.

    Attributes:
        rank, size: number of this process in the group, and how many there are.
        group: the ranks that take part; None where this process is alone.

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
        hang_report_s: float = 0,
    ) -> None:
        self.world = world
        self.device = device
        self.debug = debug
        if group is None and world.size > 1:
            group = dist.group.WORLD
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._forms = Forms(device)
        self._topics: dict[tuple[str, str], Topic] = {}
        self._exchange: Exchange | None = None
        if self.size > 1:
            self._exchange = Exchange(group, device, Watch(group, timeout_s) if debug else None)
            hangs.watch(hang_report_s, timeout_s, computes_on_cpu=device.type == "cpu")
        self._timeout_s = timeout_s

    def over(self, group: Group) -> Collectives:
        """The same operations among the ranks of `group`; this very object where those are all ranks of this one.

        Ranks:
            All ranks of `group`.
        """
        if group is None or dist.get_world_size(group) == self.size:
            return self
        return Collectives(self.world, device=self.device, group=group, debug=self.debug, timeout_s=self._timeout_s)

    def apart(self) -> Collectives:
        """The same ranks over a group of their own, on the CPU: for a thread beside the loop.

        Ranks:
            All ranks of the default group.
        """
        if self._exchange is None:
            return self
        return Collectives(self.world, device=torch.device("cpu"), group=apart(self.group))

    # -------------------------------------------------------------------- tensors

    def gather(self, tree: Tree) -> Tree:
        """The tensors of all ranks, concatenated along dim 0 in rank order; a 0-dim tensor becomes one of [size].

        Ranks may differ in dim 0, and in nothing else.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves, form = self._form("gather", tree)
        return trees.unflatten(tree, _concatenate(leaves, form, self._gather(leaves, form)))

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
        if not objects and all(isinstance(leaf, Tensor) for leaf in trees.leaves(tree)):
            leaves, form = self._form(op, tree)
            return trees.unflatten(tree, _concatenate(leaves, form, self._gather(leaves, form, local), real))
        boxed = _Box(list(tree)) if objects else _box(tree)
        mixed = trees.leaves(boxed)
        values = self._pickle(op, [leaf.value for leaf in mixed if isinstance(leaf, _Box)])
        sent = [*(leaf for leaf in mixed if isinstance(leaf, Tensor)), values]
        _, form = self._form(f"{op} {trees.structure(boxed)}", sent)
        arrived = self._gather(sent, form, local)
        tensors = _concatenate(sent, form, arrived, real, whole_last=True)
        pickles = torch.split(tensors.pop(), [one.rows[-1] for one in arrived.sent])
        lists = _join([_unpickle(data) for data in pickles], [one.aux for one in arrived.sent], real)
        merged = iter(tensors)
        return trees.map_leaves(lambda leaf: next(merged) if isinstance(leaf, Tensor) else next(lists), boxed)

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
        leaves, form = self._form(f"reduce({reduction})", tree, exact=True)
        with torch.no_grad():
            if reduction == "mean":
                leaves = [leaf.long() if leaf.dtype == torch.bool else leaf for leaf in leaves]
            if reduction == "none" or self._exchange is None:
                total = [leaf.clone() for leaf in leaves]
            else:
                total = self._sum(self._exchange, leaves, form)
            if reduction == "mean":
                total = [leaf / self.size for leaf in total]
            return trees.unflatten(tree, total if scale == 1.0 else [leaf * scale for leaf in total])

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """The tensors of rank `src` on every rank; all ranks pass the same structure, dtypes and shapes.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves, form = self._form(f"broadcast(src={src})", tree, exact=True)
        exchange = self._exchange
        if exchange is None:
            return trees.unflatten(tree, [leaf.detach().clone() for leaf in leaves])
        with torch.no_grad():
            parts = [as_bytes(leaf) for leaf in leaves]
            if not form.on_device and exchange.fits(0, sum(part.numel() for part in parts)):
                arrived = exchange.announce(form.topic, parts=parts if self.rank == src else ())
                start = arrived.sent[src].cpu_start
                return trees.unflatten(tree, _split(arrived.cpu[start:].clone(), leaves))
            exchange.announce(form.topic)
            found: dict[int, Tensor] = {}
            for places, group in ((form.on_cpu, exchange.cpu_group), (form.on_device, exchange.group)):
                if places:
                    data = torch.cat([parts[i] for i in places])
                    source = dist.get_global_rank(group, src)
                    communicate(form.topic.op, dist.broadcast, data, source, group=group)
                    found |= zip(places, _split(data, [leaves[i] for i in places]), strict=True)
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
        leaves, _ = self._form("pad_across_processes", tree)
        has = [-leaf.ndim <= dim < leaf.ndim for leaf in leaves]
        sizes = [leaf.shape[dim] if there else 0 for leaf, there in zip(leaves, has, strict=True)]
        kinds = ", ".join(f"{dtype_name(leaf)}, {leaf.ndim} dims" for leaf in leaves)
        columns = zip(*self._ints("pad_across_processes", f"{trees.structure(tree)} of {kinds}", sizes), strict=True)
        padded = [
            _pad(leaf, dim, max(column), pad_index, pad_first) if there else leaf
            for leaf, there, column in zip(leaves, has, columns, strict=True)
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
        arrived = self._exchange.gather(Topic("gather_object"), (), [self._pickle("gather_object", obj)])
        return [_unpickle(arrived.cpu[one.cpu_start :][: one.cpu_bytes]) for one in arrived.sent]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src` on every rank; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`.
        """
        exchange, topic = self._exchange, Topic(f"broadcast_object(src={src})")
        if exchange is None:
            return obj
        data = self._pickle(topic.op, obj) if self.rank == src else None
        arrived = exchange.announce(topic, parts=() if data is None else [data])
        start, count = arrived.sent[src].cpu_start, arrived.sent[src].cpu_bytes
        if start >= 0:
            return obj if data is not None else _unpickle(arrived.cpu[start : start + count])
        buffer = data if data is not None else torch.empty(count, dtype=torch.uint8, device="cpu")
        source = dist.get_global_rank(exchange.cpu_group, src)
        communicate(topic.op, dist.broadcast, buffer, source, group=exchange.cpu_group)
        return obj if data is not None else _unpickle(buffer)

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

    def _form(self, op: str, tree: Tree, exact: bool = False) -> tuple[list[Tensor], Form]:
        """The leaves of `tree`, all tensors, and what is known of its form."""
        leaves, form, bad = self._forms.of(op, tree, exact)
        if form is None:
            raise self._refuse(op, bad)
        return leaves, form

    def _refuse(self, op: str, bad: list[str]) -> CollectiveError:
        """The error for leaves that cannot be sent."""
        self._tell(op, "; ".join(bad))
        return CollectiveError(
            "collective-leaf",
            f"{op} takes dense tensors on the CPU or the rank's own device, in any nesting, and nothing else.",
            why=bad,
            fix="use gather_object (or gather_for_metrics) for other objects; `.full_tensor()` for a DTensor",
        )

    def _tell(self, op: str, why: str) -> None:
        """Lets the other ranks, on their way into the exchange, hear that this one cannot; its own error says more."""
        if self._exchange is not None:
            with contextlib.suppress(CollectiveError):
                self._exchange.announce(Topic(op, f"cannot: {why}"))

    def _gather(self, leaves: list[Tensor], form: Form, aux: int = 0) -> Arrived:
        rows = [leaf.shape[0] if leaf.ndim else -1 for leaf in leaves]
        with torch.no_grad():
            parts = [as_bytes(leaf) for leaf in leaves]
            on_cpu = [parts[i] for i in form.on_cpu]
            on_device = [parts[i] for i in form.on_device]
            if self._exchange is not None:
                return self._exchange.gather(form.topic, rows, on_cpu, on_device, aux)
            cpu = torch.cat(on_cpu) if on_cpu else torch.empty(0, dtype=torch.uint8, device="cpu")
            device = torch.cat(on_device) if on_device else None
            return Arrived([Sent(aux, rows, cpu.numel(), 0, 0, 0)], cpu, device, fresh=True)

    def _sum(self, exchange: Exchange, leaves: list[Tensor], form: Form) -> list[Tensor]:
        parts = [as_bytes(leaf) for leaf in leaves]
        if not form.on_device and exchange.fits(0, sum(part.numel() for part in parts)):
            arrived = exchange.announce(form.topic, parts=parts)
            for one in arrived.sent:
                one.rows = (1,) * len(leaves)
            stacked = _concatenate([leaf.unsqueeze(0) for leaf in leaves], form, arrived)
            return [leaf.sum(0, dtype=leaf.dtype) for leaf in stacked]
        exchange.announce(form.topic)
        found: dict[int, Tensor] = {}
        kinds = [(number in form.on_device, leaf.dtype) for number, leaf in enumerate(leaves)]
        for kind in dict.fromkeys(kinds):
            places = [i for i, other in enumerate(kinds) if other == kind]
            flat = torch.cat([leaves[i].reshape(-1) for i in places])
            group = exchange.group if kind[0] else exchange.cpu_group
            communicate(form.topic.op, dist.all_reduce, flat, group=group)
            summed = torch.split(flat, [leaves[i].numel() for i in places])
            found |= {i: part.view(leaves[i].shape) for i, part in zip(places, summed, strict=True)}
        return [found[i] for i in range(len(leaves))]

    def _ints(self, op: str, detail: str, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The numbers of each rank; they travel where a message has the rows of leaves."""
        if self._exchange is None:
            return [numbers]
        topic = self._topics.get((op, detail)) or self._topics.setdefault((op, detail), Topic(op, detail))
        return [one.rows for one in self._exchange.gather(topic, numbers, ()).sent]

    def _pickle(self, op: str, obj: Any) -> Tensor:
        try:
            return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            self._tell(op, str(error))
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

    def to(self, *_: Any) -> _Box:
        """Having it, `tree` takes a box for a leaf."""
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
    leaves: Sequence[Tensor],
    form: Form,
    arrived: Arrived,
    real: Sequence[int] | None = None,
    whole_last: bool = False,
) -> list[Tensor]:
    """Each leaf of all ranks, joined along dim 0.

    Args:
        leaves: this rank's, for dtypes and the sizes of other dims.
        form: says which of them travelled on the device.
        arrived: what each rank sent, its `aux` being the rows of its batch.
        real: how many of these are real; None keeps all.
        whole_last: whether the last leaf is kept whole all the same.
    """
    sent = arrived.sent
    cpu_start, device_start = [one.cpu_start for one in sent], [one.device_start for one in sent]
    joined = []
    for number, leaf in enumerate(leaves):
        on_device = number in form.on_device
        buffer, start = (arrived.device, device_start) if on_device else (arrived.cpu, cpu_start)
        if buffer is None:  # no rank has a byte on the device
            buffer = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        shape = leaf.shape[1:]
        row_bytes = shape.numel() * leaf.element_size()
        rows = [abs(one.rows[number]) for one in sent]  # -1 says 0-dim: one row
        kept = rows
        if real is not None and not (whole_last and number == len(leaves) - 1):
            if leaf.ndim and all(one.rows[number] == one.aux for one in sent):
                kept = [min(pair) for pair in zip(rows, real, strict=True)]
            else:
                kept = [have if there else 0 for have, there in zip(rows, real, strict=True)]
        total = sum(kept)
        if total * row_bytes == buffer.numel() and (arrived.fresh or on_device):
            data = buffer  # a single leaf of equal sizes: it lies there as it is wanted
        else:
            parts = [buffer[at : at + keep * row_bytes] for at, keep in zip(start, kept, strict=True) if keep]
            data = torch.cat(parts) if parts else buffer.new_empty(0)
        for rank, have in enumerate(rows):
            start[rank] += have * row_bytes
        joined.append(data.view(leaf.dtype).view(total, *shape))
    return joined


def _split(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the dtypes and shapes of `like`, from bytes that lie one after the other."""
    found, start = [], 0
    for leaf in like:
        end = start + leaf.numel() * leaf.element_size()
        found.append(data[start:end].clone().view(leaf.dtype).view(leaf.shape))
        start = end
    return found


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


def _unpickle(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # from ranks of this very run


def _pad(leaf: Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> Tensor:
    have = leaf.shape[dim]
    if have == size:
        return leaf.detach()
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    padded.narrow(dim, size - have if pad_first else 0, have).copy_(leaf.detach())
    return padded
