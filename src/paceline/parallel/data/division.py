"""How ranks along `shard` divide the work and the states of an optimizer whose parameters each of them holds whole.

    ByRows          each rank steps some rows of every parameter, as DTensor's `Shard(0)` cuts them: even, and exact
                    for an optimizer that treats every element by itself
    ByParameters    each rank steps some parameters: for optimizers that look at whole matrices, such as Muon

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from paceline.parallel.stand_ins import stand_in, stand_ins
from paceline.torch_internals.tensors import dtensor as dtensor_of
from paceline.world.param_groups import parameters_by_number, parameters_of
from paceline.world.sharded import is_sharded, local
from paceline.world.transport import transport_of
from paceline.world.works import Handle, wait_all

DIRECT = 1 << 18  # bytes from which a tensor travels by itself, without a copy; smaller ones are packed


def rows(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank, as views; those of the last ones may be fewer or none."""
    length = tensor.shape[0]
    size = -(-length // ranks)
    return [tensor[min(rank * size, length) : min((rank + 1) * size, length)] for rank in range(ranks)]


def packed_width(tensors: Iterable[Tensor], ranks: int) -> int:
    """Elements that one rank's rows of all tensors take in a packed buffer."""
    return sum(-(-t.shape[0] // ranks) * (t.numel() // max(1, t.shape[0])) for t in tensors)


def even(tensor: Tensor, ranks: int) -> bool:
    """Whether all ranks have equally many rows, one after the other in memory: then no view of each is needed."""
    return tensor.shape[0] % ranks == 0 and tensor.is_contiguous()


def pack(flat: Tensor, tensors: Iterable[Tensor], rank: int | None = None) -> None:
    """Copies rows of each tensor (of one rank alone, where it is named) to their places in a packed buffer.

    Shape: flat [ranks, packed_width].
    """
    for tensor, place in _places(flat, tensors):
        if rank is None and even(tensor, len(flat)):
            place.copy_(tensor.view(len(flat), -1))
            continue
        for number, part in enumerate(rows(tensor, len(flat))):
            if rank in (None, number):
                place[number, : part.numel()].view(part.shape).copy_(part)


def unpack(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copies rows from a packed buffer to the tensors."""
    for tensor, place in _places(flat, tensors):
        if even(tensor, len(flat)):
            tensor.view(len(flat), -1).copy_(place)
            continue
        for number, part in enumerate(rows(tensor, len(flat))):
            part.copy_(place[number, : part.numel()].view(part.shape))


def packed_parts(output: Tensor, tensors: Iterable[Tensor], rank: int, ranks: int) -> list[Tensor]:
    """The rows of one rank of each tensor, as views of that rank's row of a packed buffer. Shape: output [packed_width]."""
    parts = []
    start = 0
    for tensor in tensors:
        num_rows = -(-tensor.shape[0] // ranks)
        num_own_rows = max(0, min(num_rows, tensor.shape[0] - rank * num_rows))
        row_size = tensor[:1].numel()
        parts.append(output[start : start + num_own_rows * row_size].view(num_own_rows, *tensor.shape[1:]))
        start += num_rows * row_size
    return parts


def _places(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with the columns of a packed buffer that are its own; those of a rank with fewer rows end earlier."""
    at = 0
    for tensor in tensors:
        width = packed_width([tensor], len(flat))
        yield tensor, flat[:, at : at + width]
        at += width


def travels_alone(tensor: Tensor) -> bool:
    """Whether a tensor is sent from where it is, by itself, rather than packed with others."""
    return tensor.numel() * tensor.element_size() >= DIRECT and tensor.is_contiguous()


def batches(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, up to `limit` bytes, in order."""
    full: list[list[Tensor]] = []
    # Of each dtype and device, the batch that is being filled and its bytes.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        batch, num_bytes = filling.get(kind, ([], limit + 1))
        if num_bytes + tensor.nbytes > limit:
            batch = []
            num_bytes = 0
            full.append(batch)
        batch.append(tensor)
        filling[kind] = (batch, num_bytes + tensor.nbytes)
    return full


def dtensor(part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """This rank's rows, wherever they lie, as a DTensor of the whole `shape`; the whole of one without dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placement = Shard(0) if shape else Replicate()
    return dtensor_of(part, mesh, (placement,), shape, strides)


class _Divided:
    """What both ways of dividing share.

    Args:
        mesh: the ranks along `shard`, 1-D.
        parameters: those of the model that are trained.
        limit: bytes that are packed together.
    """

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Tensor], limit: int) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._transport = transport_of(self.group, torch.device(mesh.device_type))
        self._parameters = set(parameters)
        self._limit = limit

    def covers(self, parameter: Tensor) -> bool:
        """Whether it is about this parameter at all."""
        return parameter in self._parameters

    def part(self, parameter: Tensor) -> Tensor:
        """What this rank steps in place of the parameter."""
        raise NotImplementedError

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Gives every rank the parameters that were stepped."""
        raise NotImplementedError

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """While it is open, the optimizer holds this rank's part; after it, every rank has all new values. Ranks: all."""

        def own_part(parameter: Tensor) -> Tensor:
            return self.part(parameter) if self.covers(parameter) else parameter

        with stand_ins(optimizer, own_part):
            yield
        stepped = []
        for parameter in parameters_of(optimizer):
            if self.covers(parameter) and parameter.grad is not None and parameter.numel():
                stepped.append(parameter)
        with torch.no_grad():
            self.share(stepped)


class ByRows(_Divided):
    """Rows of every parameter; one without dimensions is stepped by every rank."""

    def keeps(self, parameter: Tensor) -> bool:
        """Every rank keeps something of each state."""
        return True

    def part(self, parameter: Tensor) -> Tensor:
        """The rows of this rank, on the memory of the parameter, with the rows of its gradient."""
        grad = parameter.grad
        if is_sharded(grad):
            grad = local(grad)
        elif parameter.dim() == 0:
            return parameter
        elif grad is not None:
            grad = self.mine(grad)
        data = parameter.detach()
        return stand_in(parameter, self.mine(data) if data.dim() else data, grad)

    def mine(self, tensor: Tensor) -> Tensor:
        """The rows of this rank, as a view."""
        size = -(-tensor.shape[0] // self.ranks)
        return tensor[self.rank * size : (self.rank + 1) * size]

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Large tensors go from and to where they are; small ones are packed."""
        tensors = [p.detach() for p in parameters if p.dim()]
        under_way = [self._gather(t) for t in tensors if travels_alone(t)]
        try:
            for batch in batches([t for t in tensors if not travels_alone(t)], self._limit):
                flat = batch[0].new_empty((self.ranks, packed_width(batch, self.ranks)))
                pack(flat, batch, self.rank)
                self._transport.all_gather(flat.view(-1), flat[self.rank]).wait()
                unpack(flat, batch)
        finally:
            wait_all(under_way)

    def _gather(self, tensor: Tensor) -> Handle:
        if even(tensor, self.ranks):
            return self._transport.all_gather(tensor.view(-1), self.mine(tensor).view(-1))
        return self._transport.gather_parts(rows(tensor, self.ranks))

    # -- states ----------------------------------------------------------------------------------------------

    def split(self, parameter: Tensor, state: object) -> object:
        """This rank's rows of a state that is whole or a DTensor; any other state as it is."""
        if is_sharded(state):
            return local(state)
        if isinstance(state, Tensor) and parameter.dim() and state.shape == parameter.shape and self.ranks > 1:
            return self.mine(state).clone(memory_format=torch.contiguous_format)
        return state

    def join(self, parameter: Tensor, state: object) -> object:
        """A state of this rank's rows as a DTensor of the parameter's shape; any other as it is."""
        if not isinstance(state, Tensor) or not parameter.dim() or is_sharded(state):
            return state
        if state.shape != self.mine(parameter).shape:
            return state
        return dtensor(state, self.mesh, parameter.shape)

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A DTensor of the parameter's shape, without values."""
        if not parameter.dim():
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return dtensor(torch.empty_like(self.mine(parameter.detach()), dtype=dtype), self.mesh, parameter.shape)


class ByParameters(_Divided):
    """Whole parameters, dealt out by size: the largest first, each to the rank that has least so far."""

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Tensor], limit: int) -> None:
        parameters = list(parameters)
        super().__init__(mesh, parameters, limit)
        loads = [0] * self.ranks
        self._owners: dict[Tensor, int] = {}
        for parameter in sorted(parameters, key=lambda p: -p.numel()):  # stable: alike on all ranks
            owner = loads.index(min(loads))
            self._owners[parameter] = owner
            loads[owner] += parameter.numel()

    def owner(self, parameter: Tensor) -> int:
        """The rank along the axis that steps the parameter, and keeps its states."""
        return self._owners[parameter]

    def keeps(self, parameter: Tensor) -> bool:
        """Whether this rank steps the parameter."""
        return self.owner(parameter) == self.rank

    def part(self, parameter: Tensor) -> Tensor:
        """The parameter with its whole gradient on its owner, and without one on others, which then leave it alone."""
        grad = parameter.grad
        if is_sharded(grad):
            grad = self._collect(parameter, grad)
        elif self.keeps(parameter):
            return parameter
        return stand_in(parameter, parameter.detach(), grad if self.keeps(parameter) else None)

    def _collect(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """The whole gradient on the owner, from the rows that each rank has."""
        part: Tensor = local(grad)
        if not parameter.dim() or not parameter.numel():
            return part
        whole = torch.empty_like(parameter.detach(), memory_format=torch.contiguous_format)
        places = rows(whole, self.ranks)
        places[self.rank].copy_(part)
        self._transport.collect_parts(places, self._owners[parameter]).wait()
        return whole

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Every owner sends its own: large ones from where they are, small ones packed."""
        under_way = []
        for owner in range(self.ranks):
            owned = [p.detach() for p in parameters if self._owners[p] == owner]
            alone = [t for t in owned if travels_alone(t)]
            under_way += [dist.broadcast(t, group=self.group, group_src=owner, async_op=True) for t in alone]
            for batch in batches([t for t in owned if not travels_alone(t)], self._limit):
                flat = torch.cat([t.reshape(-1) for t in batch])
                dist.broadcast(flat, group=self.group, group_src=owner)
                parts = flat.split([t.numel() for t in batch])
                for tensor, part in zip(batch, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))
        wait_all(under_way)

    # -- states ----------------------------------------------------------------------------------------------

    def split(self, parameter: Tensor, state: object) -> object:
        """Nothing to cut; which parameters have states here is `keeps`."""
        return state

    def join(self, parameter: Tensor, state: object) -> object:
        """States are whole."""
        return state

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A whole tensor."""
        return torch.empty_like(parameter.detach(), dtype=dtype)


def keep_divided(optimizer: Optimizer, division: ByRows | ByParameters) -> None:
    """Lets `state_dict` give divided states as DTensors, and `load_state_dict` take those or whole ones."""

    def convert(state_dict: dict[str, Any], keep: bool, change: Callable[[Tensor, object], object]) -> dict[str, Any]:
        parameters = parameters_by_number(optimizer, state_dict)
        states = {}
        for number, state in state_dict["state"].items():
            parameter = parameters.get(number)
            if parameter is None or not division.covers(parameter):
                states[number] = state
            elif keep or division.keeps(parameter):
                states[number] = {key: change(parameter, value) for key, value in state.items()}
        return {**state_dict, "state": states}

    optimizer.register_state_dict_post_hook(lambda _, state: convert(state, True, division.join))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: convert(state, False, division.split))
    # States of other parameters stay, and what else an optimizer keeps there.
    covered = [
        parameter for parameter in optimizer.state if isinstance(parameter, Tensor) and division.covers(parameter)
    ]
    for parameter in covered:
        if division.keeps(parameter):
            state = optimizer.state[parameter]
            state.update({key: division.split(parameter, value) for key, value in state.items()})
        else:
            del optimizer.state[parameter]
