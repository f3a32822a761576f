"""Collective operations on nested structures of tensors, and on objects, for the accelerator and the strategies.

A whole structure travels in one exchange. Each exchange first checks that all ranks call the same operation. How that
check works and how the bytes travel is in `exchange.py`; this module turns bytes into tensors and objects, and back.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError
from paceline.world import tree as trees
from paceline.world.arrived import Arrived, ByteLayout, RankPayload, Topic, as_bytes
from paceline.world.form import Form, Forms, described, dtype_name
from paceline.world.mesh import Group, group_beside
from paceline.world.received import concatenate, tensors_from
from paceline.world.tree import Tree
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.world.exchange import Exchange

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
            # Loaded here: one process sends nothing, and has no use for messages, their links and the reports about them.
            from paceline.world.exchange import Exchange
            from paceline.world.hang_reports import reports_for

            reports = reports_for(is_asked=debug)
            check = None
            if debug and reports is not None and group is not None:
                check = reports.call_check(group, timeout_s, computes_on_cpu=device.type == "cpu")
            self._exchange = Exchange(group, device, check)
        self._timeout_s = timeout_s

    def over(self, group: Group) -> Collectives:
        """Returns the same operations among the ranks of `group`, or this object if these are its own ranks.

        Ranks:
            All ranks of `group`.
        """
        if group is None or self.group is None:
            return self
        if dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self.group):
            return self
        return Collectives(self.world, device=self.device, group=group, debug=self.debug, timeout_s=self._timeout_s)

    def apart(self) -> Collectives:
        """Returns operations among the same ranks over a CPU group of their own, for a thread that runs beside the loop.

        Two threads must not share a group: each rank could then start their collectives in another order.

        Ranks:
            All ranks of the default group.
        """
        if self._exchange is None:
            return self
        return Collectives(self.world, device=torch.device("cpu"), group=group_beside(self.group))

    @property
    def cpu_group(self) -> Group:
        """The group of the same ranks for tensors on the CPU; None where this process is alone."""
        return None if self._exchange is None else self._exchange.cpu_group

    def backward_failed(self, error: BaseException) -> None:
        """Tells the other ranks of an error in a backward pass: they would wait for this rank's gradients."""
        if self._exchange is not None:
            self._exchange.backward_failed(error)

    def backward_passed(self) -> None:
        """Takes that back, because a later backward pass of this rank has succeeded."""
        if self._exchange is not None:
            self._exchange.backward_passed()

    # -------------------------------------------------------------------- tensors

    def gather(self, tree: Tree) -> Tree:
        """Returns the tensors of all ranks, concatenated along dim 0 in rank order; a 0-dim tensor becomes one of shape [size].

        Shape:
            Each tensor [N, ...], where N may differ between ranks and nothing else may; gives [sum of N, ...].

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves, form = self._form("gather", tree)
        return trees.unflatten(tree, concatenate(leaves, form, self._gather(leaves, form)))

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

        Shape:
            With L = `local` and R = the sum of `real`: a tensor [L, ...] gives [R, ...], one of no dims [number of ranks
            with a real row], and any other [N, ...] the N of those ranks together.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-object`.
        """
        assert len(real) == self.size, "`real` has one entry a rank"
        op = "gather_for_metrics"
        if not objects and trees.has_only_tensors(tree):
            leaves, form = self._form(op, tree)
            arrived = self._gather(leaves, form, local)
            return trees.unflatten(tree, concatenate(leaves, form, arrived, real))
        # The objects of all leaves travel as one tensor of bytes, after the tensors.
        boxed = _Box(list(tree)) if objects else _box(tree)
        boxes = [leaf.value for leaf in trees.leaves(boxed) if isinstance(leaf, _Box)]
        leaves = [*trees.tensors(boxed), self._pickle(op, boxes)]
        _, form = self._form(f"{op} {trees.structure(boxed)}", leaves)
        # Pickles seldom have the same size on each rank, so the ranks exchange their sizes without trying to agree first.
        arrived = self._gather(leaves, form, local, uneven=True)
        # The tensor of pickles is kept whole: its rows are bytes, and `_join` drops the objects of filler rows.
        tensors = concatenate(leaves, form, arrived, real, whole_last=True)
        pickles = torch.split(tensors.pop(), [sent.rows[-1] for sent in arrived.sent])
        boxes_by_rank = [_unpickle(data) for data in pickles]
        lists = _join(boxes_by_rank, [sent.aux for sent in arrived.sent], real)
        merged = iter(tensors)

        def gathered(leaf: object) -> Any:
            return next(merged) if isinstance(leaf, Tensor) else next(lists)

        return trees.map_leaves(gathered, boxed)

    def reduce(self, tree: Tree, reduction: Reduction = "sum", scale: float = 1.0) -> Tree:
        """Returns the sum or mean of each tensor over the ranks, times `scale`; with "none" it only multiplies by `scale`.

        A sum of integers has their dtype; a mean of integers has torch's default float dtype. Every rank gets the same bits.

        Shape:
            Any, the same on all ranks; the result has the same shapes.

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
                total = [leaf / self.size for leaf in total]
            if scale != 1.0:
                total = [leaf * scale for leaf in total]
            return trees.unflatten(tree, total)

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """Returns the tensors of rank `src` on every rank.

        Shape:
            Any. Shapes, structure and dtypes are the same on all ranks, and the result has them too.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves, form = self._form(f"broadcast(src={src})", tree, exact=True)
        exchange = self._exchange
        if exchange is None:
            return trees.unflatten(tree, [leaf.detach().clone() for leaf in leaves])
        with torch.no_grad():
            parts = [as_bytes(leaf) for leaf in leaves]
            num_bytes = sum(part.numel() for part in parts)
            if not form.on_device and exchange.fits(0, num_bytes):
                own_parts = parts if self.rank == src else ()
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
        """Pads each tensor along `dim` to the largest size that any rank has there; tensors without that dim stay.

        Args:
            tree: tensors that may differ between ranks in `dim`.
            dim: the dimension, negative ones counted from the end.
            pad_index: the value to pad with. A tensor whose dtype cannot hold it gets the dtype of a sum of both, on all ranks.
            pad_first: put the padding before the data.

        Shape:
            [..., N, ...] with N at `dim`; gives [..., largest N of all ranks, ...].

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        leaves, _ = self._form("pad_across_processes", tree)
        leaves = [leaf.to(_padded_dtype(leaf, pad_index)) for leaf in leaves]
        sizes = [_size_at(leaf, dim) for leaf in leaves]
        # The ranks compare dtypes and numbers of dims, but no sizes: these may differ.
        kinds = ", ".join(f"{dtype_name(leaf)}, {leaf.ndim} dims" for leaf in leaves)
        largest = self._combine("pad_across_processes", described(tree, kinds), sizes, "max")
        padded = [_pad(leaf, dim, size, pad_index, pad_first) for leaf, size in zip(leaves, largest, strict=True)]
        return trees.unflatten(tree, padded)

    # -------------------------------------------------------------------- objects, flags, numbers

    def gather_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order. They can be any objects that pickle accepts.

        Raises:
            CollectiveError: `collective-object`, where a rank's object cannot be pickled.
        """
        if self._exchange is None:
            return [obj]
        pickled = self._pickle("gather_object", obj)
        arrived = self._exchange.gather(Topic("gather_object"), (), [pickled], uneven=True)
        return [_unpickle(arrived.bytes_of(rank)) for rank in range(self.size)]

    def collect_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order, on rank 0; an empty list on the other ranks.

        Raises:
            CollectiveError: `collective-object`, where a rank's object cannot be pickled.
        """
        if self._exchange is None:
            return [obj]
        pickled = self._pickle("collect_object", obj)
        self._exchange.agree(Topic("collect_object"))
        group = self._exchange.cpu_group
        # `dist.gather_object` wants a list on the destination, and None on every other rank.
        pickles: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._exchange.communicate("collect_object", dist.gather_object, pickled, pickles, group=group, group_dst=0)
        return [_unpickle(data) for data in pickles or ()]

    def scatter_object(self, objs: Sequence[Any]) -> Any:
        """Returns the entry of this rank in the sequence that rank 0 passes; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`.
        """
        if self._exchange is None:
            return objs[0]
        pickles: list[Any] | None = None
        if self.rank == 0:
            pickles = [self._pickle("scatter_object", obj) for obj in objs]
        self._exchange.agree(Topic("scatter_object"))
        received: list[Any] = [None]
        group = self._exchange.cpu_group
        self._exchange.communicate(
            "scatter_object", dist.scatter_object_list, received, pickles, group=group, group_src=0
        )
        return _unpickle(received[0])

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src` on every rank; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`.
        """
        exchange = self._exchange
        if exchange is None:
            return obj
        topic = Topic(f"broadcast_object(src={src})")
        is_source = self.rank == src
        pickled = [self._pickle(topic.op, obj)] if is_source else []
        arrived = exchange.announce(topic, pickled)
        if arrived.cpu is not None:  # the object fitted into the message
            return obj if is_source else _unpickle(arrived.bytes_of(src))
        if not is_source:  # the message has said how large it is
            num_bytes = arrived.sent[src].cpu_bytes
            pickled.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
        source = dist.get_global_rank(exchange.cpu_group, src)
        exchange.communicate(topic.op, dist.broadcast, pickled[0], source, group=exchange.cpu_group)
        return obj if is_source else _unpickle(pickled[0])

    def barrier(self, op: str = "wait_for_everyone") -> None:
        """Waits until all ranks are here. Work that is queued on an accelerator is not waited for.

        Args:
            op: the name of the operation for errors about ranks that are elsewhere.
        """
        self._combine(op, "", (), "sum")

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any rank."""
        (num_set,) = self._combine("any", "", (int(flag),), "sum")
        return num_set > 0

    def same(self, number: int) -> bool:
        """Returns whether all ranks have the same number, which fits into 63 bits. It uses no accelerator."""
        highest, negated_lowest = self._combine("same", "", (number, -number), "max")
        return highest == -negated_lowest

    def sum_ints(self, numbers: Sequence[int]) -> list[int]:
        """Returns the sum of each number over the ranks. It uses no accelerator.

        Raises:
            CollectiveError: `collective-mismatch`, if the ranks pass different counts of numbers.
        """
        return self._combine("sum", f"{len(numbers)} numbers", numbers, "sum")

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sum of each number over the ranks, in rank order. It uses no accelerator.

        Raises:
            CollectiveError: `collective-mismatch`, if the ranks pass different counts of numbers.
        """
        if self._exchange is None:
            return list(map(float, numbers))
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        # [ranks, numbers]
        table = self.gather(own.unsqueeze(0))
        total: list[float] = table.sum(0).tolist()
        return total

    def check(self, op: str, detail: str = "") -> None:
        """In debug mode: waits until all ranks are here, and checks that they do the same from the same line.

        Raises:
            CollectiveError: `collective-diverged`, `collective-missing`, on every rank.
        """
        if self._exchange is not None and self._exchange.call_check is not None:
            self._exchange.call_check.check(op, detail)

    def decline(self, op: str, why: str) -> None:
        """Tells the other ranks, which enter the exchange now, that this rank cannot take part.

        They raise `collective-mismatch`. The same error is suppressed here, because the caller raises one that says more.
        """
        if self._exchange is not None:
            with contextlib.suppress(CollectiveError):
                self._exchange.announce(Topic(op, f"cannot: {why}"))

    # -------------------------------------------------------------------- parts of the operations

    def _form(self, op: str, tree: Tree, exact: bool = False) -> tuple[list[Tensor], Form]:
        """Returns the leaves of `tree`, which must all be tensors, and the form that the ranks compare."""
        leaves, form, problems = self._forms.of(op, tree, exact)
        if form is not None:
            return leaves, form
        # Without this the other ranks would wait in the exchange until their timeout.
        self.decline(op, "; ".join(problems))
        raise CollectiveError(
            "collective-leaf",
            f"{op} takes dense tensors on the CPU or the rank's own device, in any nesting, and nothing else.",
            why=problems,
            fix="use gather_object (or gather_for_metrics) for other objects; `.full_tensor()` for a DTensor",
        )

    def _gather(self, leaves: list[Tensor], form: Form, aux: int = 0, uneven: bool = False) -> Arrived:
        """Sends the bytes of all leaves to all ranks.

        Args:
            leaves, form: as `_form` has returned them.
            aux: a number of the operation's own, which is sent too.
            uneven: whether the sizes of the leaves probably differ between ranks.
        """
        # The numbers of rows travel with the bytes; -1 stands for a tensor without dims.
        rows_of_leaves = [leaf.shape[0] if leaf.ndim else -1 for leaf in leaves]
        with torch.no_grad():
            on_cpu = [as_bytes(leaves[place]) for place in form.on_cpu]
            on_device = [as_bytes(leaves[place]) for place in form.on_device]
            if self._exchange is None:
                return _arrived_alone(rows_of_leaves, on_cpu, on_device, aux)
            return self._exchange.gather(form.topic, rows_of_leaves, on_cpu, on_device, aux, uneven)

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

    def _combine(self, op: str, detail: str, numbers: Sequence[int], combination: Literal["sum", "max"]) -> list[int]:
        if self._exchange is None:
            return list(numbers)
        # Topics are kept, because the fingerprint of a new one is a hash.
        if (op, detail) not in self._topics:
            self._topics[op, detail] = Topic(op, detail)
        return self._exchange.combine(self._topics[op, detail], numbers, combination)

    def _pickle(self, op: str, obj: object) -> Tensor:
        try:
            return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            self.decline(op, str(error))
            raise CollectiveError(
                "collective-object",
                f"{op}: an object of type {type(obj).__name__} cannot be sent to other processes.",
                why=f"pickle says: {error}",
                fix="send plain data: numbers, strings, tensors, lists and dicts of them",
            ) from error


def _arrived_alone(rows: Sequence[int], on_cpu: list[Tensor], on_device: list[Tensor], aux: int) -> Arrived:
    """Returns the bytes of a single process in the form in which an exchange returns those of several."""
    # The empty tensor lets `torch.cat` work where no leaf lies on the CPU.
    no_bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
    cpu_bytes = torch.cat([no_bytes, *on_cpu])
    device_place = ByteLayout(torch.cat(on_device), [0]) if on_device else None
    sent = RankPayload(aux, rows, cpu_bytes.numel())
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


def _join(boxes: list[list[Any]], loaded: Sequence[int], real: Sequence[int]) -> Iterator[list[Any]]:
    """Yields for each box one list with the objects of all ranks, by the rules of `gather_rows`.

    Args:
        boxes: the values of the boxes, for each rank.
        loaded: rows in the batch of each rank, filler included.
        real: real rows of each rank.
    """
    for values in zip(*boxes, strict=True):
        are_lists = all(isinstance(value, list | tuple) for value in values)
        is_batch = are_lists and all(len(value) == rows for value, rows in zip(values, loaded, strict=True))
        merged: list[Any] = []
        for value, num_real in zip(values, real, strict=True):
            if is_batch:
                merged += value[:num_real]
            elif num_real and are_lists:
                merged += value
            elif num_real:
                merged.append(value)
        yield merged


def _unpickle(data: Tensor) -> Any:
    # Unpickling runs code, but these bytes come from ranks of the same run, which run the same script.
    return pickle.loads(data.numpy().tobytes())


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
