"""`DividedModel`: the weights of a model, whole or divided over ranks. It sends rows of them to the ranks that write files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import Alone, WriterPeers, agreed, shared_among
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.weights.export import RowsOfTensor
from paceline.checkpoint.weights.sources import WeightEntry
from paceline.world.arrived import as_bytes
from paceline.world.parts import Part, deliver, part_of_whole, regions, rows_between, size_of
from paceline.world.sharded import local


class DividedModel:
    """The tensors of a model on all ranks. A tied tensor is there once, and names have no prefixes of wrappers.

    Args:
        tensors: the tensors of this rank, by name; one that is no DTensor is whole.
        peers: the ranks that hold the model; None for this rank alone.
        order: names of the whole model; tensors that it does not name follow in the order of the ranks.

    Attributes:
        entries: all tensors of the model, the same list on all ranks.

    Ranks: all make it; two `gather_object`s.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], peers: WriterPeers | None = None, order: Iterable[str] = ()
    ) -> None:
        self._peers = peers or Alone()
        self._tensors: dict[str, Tensor] = {}
        own: dict[str, tuple[str, tuple[int, ...], Part]] = {}
        for name, tensor in tensors.items():
            self._tensors[name] = local(tensor.detach())
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            own[name] = (dtype_name, tuple(tensor.shape), part_of_whole(tensor))
        entries: dict[str, WeightEntry] = {}
        self._holders: dict[str, dict[Part, int]] = {}
        for rank, tensors_of_rank in enumerate(shared_among(self._peers, own)):
            for name, (dtype, shape, part) in tensors_of_rank.items():
                entries.setdefault(name, WeightEntry(name, shape, getattr(torch, dtype)))
                # Ranks that hold the same part should have equal bytes. The lowest of them sends it.
                self._holders.setdefault(name, {}).setdefault(part, rank)
        # A dictionary keeps the first place of each name: those of `order` come first, in their order.
        names = dict.fromkeys([*order, *entries])
        self.entries = [entries[name] for name in names if name in entries]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        peers: WriterPeers | None = None,
        order: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> DividedModel:
        """Returns the divided model of a module, wrapped or not.

        Args:
            module, peers, order: as in the constructor.
            tied: other names of tied parameters -> the first. A stage of a pipeline may know one only by another name.

        Raises:
            CheckpointError: `checkpoint-value`, on all ranks.
        """
        group = peers or Alone()
        state = agreed(group, "reading the model", lambda: _tensors_of(ModuleState.of(module)))
        first_names = tied or {}
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            tensors.setdefault(first_names.get(name, name), tensor)
        return cls(tensors, group, order)

    def fetch(self, wanted: Sequence[Sequence[RowsOfTensor]]) -> list[Tensor]:
        """Returns the bytes of the rows that this rank writes, from the ranks that hold them.

        Args:
            wanted: for each rank, the rows that it writes; the same on all ranks.

        Ranks: all.
        """
        own_rank = self._peers.rank
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, int] = {}
        for writer, rows_of_writer in enumerate(wanted):
            for rows in rows_of_writer:
                for part, holder in self._holders[rows.entry.name].items():
                    # Nothing is sent if this rank is holder and writer, or neither of them.
                    if (holder == own_rank) == (writer == own_rank):
                        continue
                    count = _num_bytes(rows, part)
                    # Every rank walks over all rows in the same order, so a receiver knows without a message how many bytes
                    # come from whom, and in which order.
                    if count and holder == own_rank:
                        outgoing.setdefault(writer, []).append(self._bytes(rows, part))
                    elif count:
                        incoming[holder] = incoming.get(holder, 0) + count
        packed = {writer: torch.cat(data).cpu() for writer, data in outgoing.items()}
        arrived = deliver(getattr(self._peers, "cpu_group", None), packed, incoming)
        return [self._whole(rows, arrived) for rows in wanted[own_rank]]

    def _whole(self, rows: RowsOfTensor, arrived: dict[int, Tensor]) -> Tensor:
        """Puts the bytes of some rows together. Those of other ranks are taken from the front of `arrived[rank]`."""
        dtype = rows.entry.dtype
        holders = self._holders[rows.entry.name]
        whole: Tensor | None = None
        if len(holders) > 1:  # so it is divided, and has dimensions
            shape = (rows.stop - rows.start, *rows.entry.shape[1:])
            whole = torch.empty(shape, dtype=dtype, device="cpu")
        for part, holder in holders.items():
            count = _num_bytes(rows, part)
            if not count:
                data = torch.empty(0, dtype=torch.uint8, device="cpu")
            elif holder == self._peers.rank:
                data = self._bytes(rows, part).cpu()
            else:
                data = arrived[holder][:count]
                arrived[holder] = arrived[holder][count:]
            if whole is None:
                return data  # the only holder has whole rows, which need not be put together
            if not count:
                continue
            # A view as another dtype must begin at a multiple of the size of its numbers.
            if data.storage_offset() % dtype.itemsize:
                data = data.clone()
            within = _within(rows, part)
            own = data.view(dtype).view([size_of(runs) for runs in within])
            for box_of_whole, box_of_own in regions(within):
                whole[box_of_whole] = own[box_of_own]
        assert whole is not None, "each tensor has a holder"
        return as_bytes(whole)

    def _bytes(self, rows: RowsOfTensor, part: Part) -> Tensor:
        """Returns the bytes of this rank's part of some rows, on their device."""
        tensor = self._tensors[rows.entry.name]
        if not part:
            return as_bytes(tensor)
        _, first, last = rows_between(part, rows.start, rows.stop)
        return as_bytes(tensor[first:last])


def _within(rows: RowsOfTensor, part: Part) -> Part:
    """Returns the part of some rows that a part of the tensor holds, counted from the first of the rows."""
    return rows_between(part, rows.start, rows.stop)[0] if part else ()


def _num_bytes(rows: RowsOfTensor, part: Part) -> int:
    return prod(size_of(runs) for runs in _within(rows, part)) * rows.entry.dtype.itemsize


def _tensors_of(state: ModuleState) -> dict[str, Tensor]:
    """Returns the tensors of a module; raises `checkpoint-value` if its state holds anything else."""
    if state.values:
        name = next(iter(state.values))
        raise CheckpointError(
            "checkpoint-value",
            f"{name} is a {type(state.values[name]).__qualname__}, which a file of weights does not hold.",
            why="the module puts more than tensors into its state_dict",
            fix="save the whole state with save_state, or give `state_dict` without it",
        )
    return state.tensors
