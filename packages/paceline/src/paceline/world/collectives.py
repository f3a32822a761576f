"""Collective operations on nested structures of tensors, and on objects, for the accelerator and the strategies.

A whole structure travels in one exchange. Each exchange first checks that all ranks call the same operation. How that
check works and how the bytes travel is in `exchange.py`; `structures.py` turns structures of tensors into bytes, and back.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CollectiveError, PrepareError
from paceline.world.arrived import CountsOf, Topic, unpickled
from paceline.world.mesh import Group, group_beside
from paceline.world.tree import Tree
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.world.exchange import Exchange
    from paceline.world.hang_reports import HangReports
    from paceline.world.structures import StructureOperations

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
        self._topics: dict[tuple[str, str], Topic] = {}
        self._exchange: Exchange | None = None
        self._reports: HangReports | None = None
        self._has_told_failure = False
        if self.size > 1:
            # Loaded here: one process sends nothing, and has no use for messages, their links and the reports about them.
            from paceline.world.exchange import Exchange
            from paceline.world.hang_reports import reports_for

            self._reports = reports_for(is_asked=debug)
            check = None
            if debug and self._reports is not None and group is not None:
                check = self._reports.call_check(group, timeout_s, computes_on_cpu=device.type == "cpu")
            self._exchange = Exchange(group, device, check)
        self._timeout_s = timeout_s

    def __getstate__(self) -> dict[str, Any]:
        if self.group is None:
            return vars(self)
        raise PrepareError(
            "prepare-copy",
            "an object of a run on several processes cannot be copied or pickled.",
            why="it holds connections to the other processes, as a prepared loader does",
            fix="copy what was passed to `prepare`, such as `loader.original`, and prepare the copy on all processes",
        )

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
        if self._reports is not None:
            self._reports.backward_failed(error)
            self._has_told_failure = True

    def backward_passed(self) -> None:
        """Takes that back, because a later backward pass of this rank has succeeded."""
        if self._has_told_failure and self._reports is not None:
            self._reports.backward_passed()
            self._has_told_failure = False

    # -------------------------------------------------------------------- tensors

    @cached_property
    def _of_structures(self) -> StructureOperations:
        # Loaded here: a loop of one process, which gathers nothing, needs none of it.
        from paceline.world.structures import StructureOperations

        return StructureOperations(self, self._exchange)

    def gather(self, tree: Tree) -> Tree:
        """Returns the tensors of all ranks, concatenated along dim 0 in rank order; a 0-dim tensor becomes one of shape [size].

        Shape:
            Each tensor [N, ...], where N may differ between ranks and nothing else may; gives [sum of N, ...].

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`.
        """
        return self._of_structures.gather(tree)

    def gather_rows(self, tree: Tree, counts_of: CountsOf, objects: bool = False) -> Tree:
        """Gathers what was computed from a batch, over real samples only.

        A leaf with as many rows as the batch keeps the first `real[r]` rows of each rank r. A 0-dim tensor gives one
        value, and any other tensor all its rows, for each rank that holds a real row. A list without tensors, or any
        other object, becomes one list by the same rules.

        Args:
            tree: what this rank computed from its batch.
            counts_of: returns the rows of the batch. Its argument is the same on all ranks: for each leaf its rows on each
                rank, -1 where it has no dims, or is an object and no list.
            objects: take `tree` for a list of one object a row, and give one list of all.

        Shape:
            With L = the rows that lie in the rank's batch and R = the sum of `real`: a tensor [L, ...] gives [R, ...], one of
            no dims [number of ranks with a real row], and any other [N, ...] the N of those ranks together.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-object`.
        """
        return self._of_structures.gather_rows(tree, counts_of, objects)

    def reduce(self, tree: Tree, reduction: Reduction = "sum", scale: float = 1.0) -> Tree:
        """Returns the sum or mean of each tensor over the ranks, times `scale`; with "none" it only multiplies by `scale`.

        A sum of integers has their dtype; a mean of integers has torch's default float dtype. Every rank gets the same bits.

        Shape:
            Any, the same on all ranks; the result has the same shapes.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-reduction`.
        """
        return self._of_structures.reduce(tree, reduction, scale)

    def broadcast(self, tree: Tree, src: int = 0) -> Tree:
        """Returns the tensors of rank `src` on every rank.

        Shape:
            Any. Shapes, structure and dtypes are the same on all ranks, and the result has them too.

        Raises:
            CollectiveError: `collective-mismatch`, `collective-leaf`, `collective-source`.
        """
        self._check_source("broadcast", src)
        return self._of_structures.broadcast(tree, src)

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
        return self._of_structures.pad_across(tree, dim, pad_index, pad_first)

    # -------------------------------------------------------------------- objects, flags, numbers

    def gather_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order. They can be any objects that pickle accepts.

        Raises:
            CollectiveError: `collective-object`, where a rank's object cannot be pickled.
        """
        if self._exchange is None:
            return [obj]
        pickled = self.pickled("gather_object", obj)
        arrived = self._exchange.gather(Topic("gather_object"), (), [pickled], uneven=True)
        return [unpickled(arrived.bytes_of(rank)) for rank in range(self.size)]

    def collect_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order, on rank 0; an empty list on the other ranks.

        Raises:
            CollectiveError: `collective-object`, where a rank's object cannot be pickled.
        """
        if self._exchange is None:
            return [obj]
        pickled = self.pickled("collect_object", obj)
        self._exchange.agree(Topic("collect_object"))
        group = self._exchange.cpu_group
        # `dist.gather_object` wants a list on the destination, and None on every other rank.
        pickles: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._exchange.communicate("collect_object", dist.gather_object, pickled, pickles, group=group, group_dst=0)
        return [unpickled(data) for data in pickles or ()]

    def scatter_object(self, objs: Sequence[Any]) -> Any:
        """Returns the entry of this rank in the sequence that rank 0 passes; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`.
        """
        if self._exchange is None:
            return objs[0]
        pickles: list[Any] | None = None
        if self.rank == 0:
            pickles = [self.pickled("scatter_object", obj) for obj in objs]
        self._exchange.agree(Topic("scatter_object"))
        received: list[Any] = [None]
        group = self._exchange.cpu_group
        self._exchange.communicate(
            "scatter_object", dist.scatter_object_list, received, pickles, group=group, group_src=0
        )
        return unpickled(received[0])

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src` on every rank; what other ranks pass is ignored.

        Raises:
            CollectiveError: `collective-object`, `collective-source`.
        """
        exchange = self._exchange
        if exchange is None:
            return obj
        self._check_source("broadcast_object", src)
        topic = Topic(f"broadcast_object(src={src})")
        is_source = self.rank == src
        pickled = [self.pickled(topic.op, obj)] if is_source else []
        arrived = exchange.announce(topic, pickled)
        if arrived.cpu is not None:  # the object fitted into the message
            return obj if is_source else unpickled(arrived.bytes_of(src))
        if not is_source:  # the message has said how large it is
            num_bytes = arrived.sent[src].cpu_bytes
            pickled.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
        source = dist.get_global_rank(exchange.cpu_group, src)
        exchange.communicate(topic.op, dist.broadcast, pickled[0], source, group=exchange.cpu_group)
        return obj if is_source else unpickled(pickled[0])

    def barrier(self, op: str = "wait_for_everyone") -> None:
        """Waits until all ranks are here. Work that is queued on an accelerator is not waited for.

        Args:
            op: the name of the operation for errors about ranks that are elsewhere.
        """
        self.combine(op, "", (), "sum")

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any rank."""
        (num_set,) = self.combine("any", "", (int(flag),), "sum")
        return num_set > 0

    def same(self, number: int) -> bool:
        """Returns whether all ranks have the same number, which fits into 63 bits. It uses no accelerator."""
        highest, negated_lowest = self.combine("same", "", (number, -number), "max")
        return highest == -negated_lowest

    def sum_ints(self, numbers: Sequence[int]) -> list[int]:
        """Returns the sum of each number over the ranks. It uses no accelerator.

        Raises:
            CollectiveError: `collective-mismatch`, if the ranks pass different counts of numbers.
        """
        return self.combine("sum", f"{len(numbers)} numbers", numbers, "sum")

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

    def _check_source(self, op: str, src: int) -> None:
        """Refuses a source that is no rank of the group. A process that is alone keeps what it has, whatever the source."""
        if self._exchange is None or 0 <= src < self.size:
            return
        self.decline(op, f"there is no rank {src}")
        raise CollectiveError(
            "collective-source",
            f"{op}: there is no rank {src} whose values could be sent.",
            why=f"{self.size} processes take part: ranks 0 to {self.size - 1}",
            fix="name one of these, such as 0, or start more processes",
        )

    def combine(self, op: str, detail: str, numbers: Sequence[int], combination: Literal["sum", "max"]) -> list[int]:
        """Returns the sum or the largest of each number over the ranks.

        Args:
            op: the operation, as the user calls it.
            detail: what else the ranks must agree about.
            numbers: of this rank.
            combination: "sum" or "max".
        """
        if self._exchange is None:
            return list(numbers)
        # Topics are kept, because the fingerprint of a new one is a hash.
        if (op, detail) not in self._topics:
            self._topics[op, detail] = Topic(op, detail)
        return self._exchange.combine(self._topics[op, detail], numbers, combination)

    def pickled(self, op: str, obj: object) -> Tensor:
        """Returns the pickle of an object that an operation sends to other ranks.

        Raises:
            CollectiveError: `collective-object`, where it cannot be pickled; the other ranks raise as well.
        """
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
