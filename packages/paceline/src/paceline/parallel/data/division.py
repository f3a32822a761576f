"""Divides the steps and states of an optimizer over the ranks along `shard`, each of which holds unsharded parameters.

    ByRows          each rank steps the rows of every parameter that DTensor's `Shard(0)` assigns to it. The work is even;
                    the result is exact for an optimizer that treats each element independently
    ByParameters    each rank steps some of the parameters: for optimizers that need whole matrices, such as Muon
    ByOwners        the same where parameters are divided themselves (`shard`, `tp`): their owner gathers them for the step

ZeRO stages 1 and 2 (`zero.py`) use the first two, `shard.py` and `tensor.py` the last. The functions that pack small tensors
also serve `reducer.py`.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.parallel.data.owned_states import mark_states
from paceline.parallel.divided_parameters import part_of
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.stand_ins import stand_in, stand_ins
from paceline.parallel.sums import refuse_sums
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.plan import Decision
from paceline.torch_internals.dtensor import mixtures_refused
from paceline.torch_internals.tensors import dtensor as dtensor_of
from paceline.world.param_groups import (
    elementwise_parameters,
    parameters_by_number,
    parameters_of,
    steps_whole_parameters,
)
from paceline.world.sharded import divide, division_of, is_sharded, local, whole
from paceline.world.transport import transport_of
from paceline.world.works import WorkHandle, wait_all

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DIRECT = 1 << 18  # bytes from which a tensor travels by itself, without a copy; smaller ones are packed


def rows_per_rank(tensor: Tensor, ranks: int) -> int:
    """Returns how many rows each rank has, rounded up. The last ranks may have fewer or none."""
    return -(-tensor.shape[0] // ranks)


def rows(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Returns the rows of each rank, as views. The last ranks may have fewer rows or none."""
    size = rows_per_rank(tensor, ranks)
    return [tensor[rank * size : (rank + 1) * size] for rank in range(ranks)]


def packed_width(tensors: Iterable[Tensor], ranks: int) -> int:
    """Returns the number of elements that one rank's rows of all tensors take in a packed buffer."""
    width = 0
    for tensor in tensors:
        row_size = tensor.numel() // max(1, tensor.shape[0])
        width += rows_per_rank(tensor, ranks) * row_size
    return width


def even(tensor: Tensor, ranks: int) -> bool:
    """Returns whether all ranks have the same number of rows in one contiguous tensor, which a single copy can then pack."""
    return tensor.shape[0] % ranks == 0 and tensor.is_contiguous()


def pack(flat: Tensor, tensors: Iterable[Tensor], rank: int | None = None) -> None:
    """Copies rows of each tensor into a packed buffer: those of all ranks, or of one `rank`.

    Shape: flat [ranks, packed_width].
    """
    for tensor, place in _places(flat, tensors):
        if rank is None and even(tensor, len(flat)):
            place.copy_(tensor.view(len(flat), -1))
            continue
        # The last ranks may have fewer rows than their place has room for.
        for number, part in enumerate(rows(tensor, len(flat))):
            if rank in (None, number):
                place[number, : part.numel()].view(part.shape).copy_(part)


def unpack(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copies the rows of all ranks from a packed buffer into the tensors. Shape: flat [ranks, packed_width]."""
    for tensor, place in _places(flat, tensors):
        if even(tensor, len(flat)):
            tensor.view(len(flat), -1).copy_(place)
            continue
        for number, part in enumerate(rows(tensor, len(flat))):
            part.copy_(place[number, : part.numel()].view(part.shape))


def packed_parts(output: Tensor, tensors: Iterable[Tensor], rank: int, ranks: int) -> list[Tensor]:
    """Returns one rank's rows of each tensor, as views of its row of a packed buffer. Shape: output [packed_width]."""
    parts = []
    start = 0
    for tensor in tensors:
        num_rows = rows_per_rank(tensor, ranks)
        num_own_rows = max(0, min(num_rows, tensor.shape[0] - rank * num_rows))
        row_size = tensor[:1].numel()
        parts.append(output[start : start + num_own_rows * row_size].view(num_own_rows, *tensor.shape[1:]))
        start += num_rows * row_size
    return parts


def _places(flat: Tensor, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor with its columns of a packed buffer; a rank with fewer rows leaves the last of them unused."""
    start = 0
    for tensor in tensors:
        width = packed_width([tensor], len(flat))
        yield tensor, flat[:, start : start + width]
        start += width


def travels_alone(tensor: Tensor) -> bool:
    """Returns whether a tensor is sent without a copy, rather than packed together with others."""
    return tensor.nbytes >= DIRECT and tensor.is_contiguous()


def split_by_size(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors that travel alone, and those that are packed together."""
    alone: list[Tensor] = []
    packed: list[Tensor] = []
    for tensor in tensors:
        if travels_alone(tensor):
            alone.append(tensor)
        else:
            packed.append(tensor)
    return alone, packed


def batches(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """Groups tensors of the same dtype and device into batches of up to `limit` bytes, in order."""
    full: list[list[Tensor]] = []
    # For each dtype and device, the batch that is being filled, and its bytes.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        # A kind that comes for the first time begins with a batch that counts as full, so that a new one is begun.
        batch, num_bytes = filling.get(kind, ([], limit + 1))
        if num_bytes + tensor.nbytes > limit:
            batch = []
            num_bytes = 0
            full.append(batch)
        batch.append(tensor)
        filling[kind] = (batch, num_bytes + tensor.nbytes)
    return full


@contextmanager
def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields several tensors as one flat tensor, for a single collective, and copies its values back at the end.

    Shape: [elements of all tensors].
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield flat
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def dtensor(part: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """Returns this rank's rows, on any device, as a DTensor of the unsharded `shape`; replicated if it has no dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    # The strides of a contiguous tensor of that shape.
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placement: Shard | Replicate = Shard(0)
    if not shape:
        placement = Replicate()
    return dtensor_of(part, mesh, (placement,), shape, strides)


class _Divided:
    """The common part of both divisions.

    Args:
        mesh: the ranks along `shard`, 1-D.
        parameters: the trained parameters of the model.
        limit: how many bytes of small tensors are packed into one message.
    """

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Tensor], limit: int) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self._transport = transport_of(self.group, torch.device(mesh.device_type))
        self._parameters = set(parameters)
        self._limit = limit

    def covers(self, parameter: Tensor) -> bool:
        """Returns whether the parameter is divided."""
        return parameter in self._parameters

    def adopt(self, parameter: Tensor) -> None:
        """Divides a parameter that the optimizer got later."""
        self._parameters.add(parameter)

    def part(self, parameter: Tensor) -> Tensor:
        """Returns the tensor that this rank steps in place of the parameter."""
        raise NotImplementedError

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Sends the new values of parameters that were stepped to all ranks. Ranks: all."""
        raise NotImplementedError

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """While it is open, the optimizer holds this rank's part; afterwards every rank has all new values. Ranks: all."""

        def own_part(parameter: Tensor) -> Tensor:
            if self.covers(parameter):
                return self.part(parameter)
            return parameter

        adopted: list[Tensor] = []
        for parameter in parameters_of(optimizer):
            # Another division of the same optimizer may have it.
            if is_sharded(parameter.grad) and division_of(optimizer, parameter) is None:
                self.adopt(parameter)
                adopted.append(parameter)
        self._take_states(optimizer)
        # A checkpoint that was loaded since then has given it whole states.
        self.divide_states(optimizer, adopted)
        with stand_ins(optimizer, own_part):
            yield
        stepped = []
        for parameter in parameters_of(optimizer):
            if self.covers(parameter) and parameter.grad is not None and parameter.numel():
                stepped.append(parameter)
        with torch.no_grad():
            self.share(stepped)

    def _take_states(self, optimizer: Optimizer) -> None:
        """Gives states that a method of the optimizer has made of divided gradients the form that the step works with."""
        for parameter in parameters_of(optimizer):
            if not self.covers(parameter) or parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            for name, value in state.items():
                if is_sharded(value):
                    state[name] = self.stepped_state(value)

    def stepped_state(self, state: DTensor) -> Tensor:
        """Returns what this rank steps with of a divided state. Ranks: all."""
        raise NotImplementedError

    def divide_states(self, optimizer: Optimizer, parameters: Iterable[object]) -> None:
        """Reduces whole states to what this rank keeps of them. Those of parameters that are not divided stay as they are."""
        for parameter in parameters:
            if not isinstance(parameter, Tensor) or not self.covers(parameter) or parameter not in optimizer.state:
                continue
            if self.keeps(parameter):
                state = optimizer.state[parameter]
                state.update({key: self.split(parameter, value) for key, value in state.items()})
            else:
                del optimizer.state[parameter]

    def keeps(self, parameter: Tensor) -> bool:
        """Returns whether this rank keeps states of a parameter, or a part of them."""
        raise NotImplementedError

    def split(self, parameter: Tensor, state: object) -> object:
        """Returns what this rank keeps of a state that is unsharded or a DTensor; any other state as it is."""
        raise NotImplementedError


class ByRows(_Divided):
    """Each rank steps its rows of every parameter. A parameter without dimensions is stepped by every rank."""

    def keeps(self, parameter: Tensor) -> bool:
        """Returns True: every rank keeps rows of each state."""
        return True

    def part(self, parameter: Tensor) -> Tensor:
        """Returns this rank's rows, a view of the parameter, with the rows of its gradient."""
        grad = parameter.grad
        if is_sharded(grad):
            grad = local(grad)
        elif parameter.dim() == 0:
            return parameter
        elif grad is not None:
            grad = self.mine(grad)
        data = parameter.detach()
        if data.dim():
            data = self.mine(data)
        return stand_in(parameter, data, grad)

    def stepped_state(self, state: DTensor) -> Tensor:
        """Returns this rank's rows."""
        rows_of_state: Tensor = local(state)
        return rows_of_state

    def mine(self, tensor: Tensor) -> Tensor:
        """Returns the rows of this rank, as a view."""
        size = rows_per_rank(tensor, self.ranks)
        return tensor[self.rank * size : (self.rank + 1) * size]

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Gathers the rows of all ranks: large tensors without a copy, small ones packed. Ranks: all."""
        # Every rank has stepped a parameter without dimensions itself: it has no rows to gather.
        alone, packed = split_by_size(parameter.detach() for parameter in parameters if parameter.dim())
        handles = [self._gather(tensor) for tensor in alone]
        try:
            for batch in batches(packed, self._limit):
                flat = batch[0].new_empty((self.ranks, packed_width(batch, self.ranks)))
                pack(flat, batch, self.rank)
                self._transport.all_gather(flat.view(-1), flat[self.rank]).wait()
                unpack(flat, batch)
        finally:
            wait_all(handles)

    def _gather(self, tensor: Tensor) -> WorkHandle:
        """Begins to gather the rows of a large tensor, in place."""
        if even(tensor, self.ranks):
            return self._transport.all_gather(tensor.view(-1), self.mine(tensor).view(-1))
        return self._transport.gather_parts(rows(tensor, self.ranks))

    # -- states ----------------------------------------------------------------------------------------------

    def split(self, parameter: Tensor, state: object) -> object:
        """Returns this rank's rows of a state that is unsharded or a DTensor; any other state as it is."""
        if is_sharded(state):
            return local(state)
        if isinstance(state, Tensor) and parameter.dim() and state.shape == parameter.shape and self.ranks > 1:
            return self.mine(state).clone(memory_format=torch.contiguous_format)
        return state

    def join(self, parameter: Tensor, state: object) -> object:
        """Returns a state of this rank's rows as a DTensor of the parameter's shape; any other state as it is."""
        if not isinstance(state, Tensor) or not parameter.dim() or is_sharded(state):
            return state
        if state.shape != self.mine(parameter).shape:
            return state
        return dtensor(state, self.mesh, parameter.shape)

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized DTensor of the parameter's shape."""
        if not parameter.dim():
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return dtensor(torch.empty_like(self.mine(parameter.detach()), dtype=dtype), self.mesh, parameter.shape)


class ByParameters(_Divided):
    """Each rank steps some of the parameters: the largest is assigned first, each to the rank with the fewest elements."""

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Tensor], limit: int) -> None:
        parameters = list(parameters)
        super().__init__(mesh, parameters, limit)
        self._loads = [0] * self.ranks
        self._owners: dict[Tensor, int] = {}
        # The sort is stable, so that all ranks assign the same owners.
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            self.adopt(parameter)

    def adopt(self, parameter: Tensor) -> None:
        """Also chooses the owner: the rank with the fewest elements so far."""
        super().adopt(parameter)
        owner = self._loads.index(min(self._loads))
        self._owners[parameter] = owner
        self._loads[owner] += parameter.numel()

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """As in the base class. Parameters of other ranks have no gradient meanwhile.

        Raises:
            TrainError: `zero-no-gradient`, if the optimizer does not skip such parameters.
        """
        try:
            with super().stepping(optimizer), mixtures_refused(_mixed_alone):
                yield
        except (AttributeError, TypeError) as error:
            kind = type(optimizer).__name__
            raise TrainError(
                "zero-no-gradient",
                f"{kind}.step failed, as it does if it uses gradients that are None.",
                why=f"each rank steps some of the parameters, and `grad` of the others is None; {kind} raised {error!r}",
                fix=f"skip these parameters in its loop: `if parameter.grad is None: continue`; or write `elementwise = True` "
                f"into the class {kind}, if it treats each element by itself",
            ) from error
        if not type(optimizer).__module__.startswith("torch."):
            states = _StatesOfOwners(dict, optimizer.state)
            states.keeps = lambda parameter: not self.covers(parameter) or self.keeps(parameter)
            optimizer.state = states

    def stepped_state(self, state: DTensor) -> Tensor:
        """Returns the whole state. Ranks: all."""
        whole_state: Tensor = whole(state)
        return whole_state

    def owner(self, parameter: Tensor) -> int:
        """Returns the rank along the axis that steps the parameter and keeps its states."""
        return self._owners[parameter]

    def keeps(self, parameter: Tensor) -> bool:
        """Returns whether this rank steps the parameter."""
        return self.owner(parameter) == self.rank

    def part(self, parameter: Tensor) -> Tensor:
        """Returns the parameter with its unsharded gradient; on ranks that do not own it without one, so that it is skipped."""
        grad = parameter.grad
        if is_sharded(grad):
            grad = self._collect(parameter, grad)
        elif self.keeps(parameter):
            return parameter
        if not self.keeps(parameter):
            grad = None
        return stand_in(parameter, parameter.detach(), grad)

    def _collect(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """Gathers the rows of a gradient on the owner of its parameter. Ranks: all."""
        part: Tensor = local(grad)
        if not parameter.dim() or not parameter.numel():
            return part
        whole = torch.empty_like(parameter.detach(), memory_format=torch.contiguous_format)
        places = rows(whole, self.ranks)
        places[self.rank].copy_(part)
        self._transport.collect_parts(places, self._owners[parameter]).wait()
        return whole

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Broadcasts the parameters of each owner: large ones without a copy, small ones packed. Ranks: all."""
        handles: list[WorkHandle | None] = []
        try:
            for owner in range(self.ranks):
                owned = [parameter.detach() for parameter in parameters if self._owners[parameter] == owner]
                alone, packed = split_by_size(owned)
                for tensor in alone:
                    handles.append(dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True))
                for batch in batches(packed, self._limit):
                    with flattened(batch) as flat:
                        dist.broadcast(flat, group=self.group, group_src=owner)
        finally:
            wait_all(handles)

    # -- states ----------------------------------------------------------------------------------------------

    def split(self, parameter: Tensor, state: object) -> object:
        """Returns the state as it is: states are unsharded, and `keeps` says which parameters have one here."""
        return state

    def join(self, parameter: Tensor, state: object) -> object:
        """Returns the state as it is."""
        return state

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor of the parameter's shape."""
        return torch.empty_like(parameter.detach(), dtype=dtype)


class _StatesOfOwners(defaultdict[Tensor, Any]):
    """Refuses to stand for the state of a parameter that another rank steps, where a method of the user's asks for it."""

    keeps: Callable[[Tensor], bool] | None = None  # a copy has none

    def __missing__(self, parameter: Tensor) -> Any:
        if self.keeps is None or self.keeps(parameter):
            return super().__missing__(parameter)
        raise TrainError(
            "optimizer-states",
            f"the optimizer's states of a parameter of shape {list(parameter.shape)} are on another rank.",
            why="each rank steps some of the parameters, and has only their states outside of `step`, `train` and `eval`",
            fix="use them in `step`; or, under zero=1 and zero=2, write `elementwise = True` into the class of the optimizer "
            "if it treats each element by itself; or use plan={'replicate': 'auto'}",
        )


class ByOwners(ByParameters):
    """Each rank steps some of the parameters as whole tensors, where every rank holds a part of each of them (DTensors)."""

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Tensor], limit: int) -> None:
        super().__init__(mesh, parameters, limit)
        self._gathered: dict[Tensor, Tensor] = {}  # during a step, what this rank steps

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """As in the base class."""
        try:
            with super().stepping(optimizer):
                yield
        finally:
            self._gathered.clear()

    def part(self, parameter: Tensor) -> Tensor:
        """Returns the gathered parameter with its gathered gradient; on ranks that do not own it without values. Ranks: all."""
        if parameter.grad is None:
            return stand_in(parameter, _without_memory(parameter), None)
        # One parameter at a time, so that no rank holds more than one that it does not own.
        gathered = whole(parameter.detach())
        gradient = whole(parameter.grad)
        if not self.keeps(parameter):
            return stand_in(parameter, _without_memory(parameter), None)
        if not is_sharded(parameter):
            gathered = parameter.detach()
        self._gathered[parameter] = gathered
        return stand_in(parameter, gathered, gradient)

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Broadcasts each parameter from its owner; every rank keeps its part of it. Ranks: all."""
        for parameter in parameters:
            stepped = self._gathered.get(parameter)
            if stepped is None:
                stepped = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            dist.broadcast(stepped, group=self.group, group_src=self.owner(parameter))
            if is_sharded(parameter):
                stepped = part_of(stepped, parameter)
            local(parameter.detach()).copy_(stepped)

    def leave_elementwise(self, optimizer: Optimizer) -> None:
        """Gives up parameters that are in elementwise groups by now: each rank steps its part of them, and keeps its states."""
        self._parameters.difference_update(elementwise_parameters(optimizer))

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor of the whole parameter's shape."""
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)


def step_by_owners(adapter: OptimizerAdapter, model: nn.Module, mesh: DeviceMesh) -> list[Decision]:
    """Makes an optimizer step divided parameters as whole ones, each on one rank, if its step may look at whole parameters.

    Args:
        adapter: of the optimizer.
        model: whose parameters are divided.
        mesh: all ranks that hold parts of the same parameters, 1-D.
    """
    optimizer = adapter.optimizer
    if not steps_whole_parameters(optimizer):
        return []
    independent = set(elementwise_parameters(optimizer))
    trained = [each for each in model.parameters() if each.requires_grad and each not in independent]
    division = ByOwners(mesh, trained, 0)
    # Of parameters that the optimizer gets later, it is not known yet in what groups they will be.
    adapter.follow_groups(list, division.leave_elementwise)
    step_divided(adapter, division)
    reason = (
        "it may look at a whole parameter, as it does not say that it is elementwise: each is gathered for the step by one "
        "rank, which keeps its states"
    )
    if independent:
        reason += (
            f"; {len(independent)} parameters are in groups that are elementwise, and each rank steps its part of them"
        )
    return [Decision(f"optimizer.{type(optimizer).__name__}.divided", "parameters", "derived", reason=reason)]


def _without_memory(parameter: Tensor) -> Tensor:
    """Returns a tensor of the whole parameter's shape that has no values of its own."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def step_divided(adapter: OptimizerAdapter, division: ByRows | ByParameters) -> None:
    """Makes an optimizer step what this rank has of a division, and keep its states so.

    `state_dict` returns divided states as DTensors then, and `load_state_dict` takes DTensors or unsharded tensors.

    Raises:
        PrepareError: `optimizer-sums`.
    """
    optimizer = adapter.optimizer
    if isinstance(division, ByParameters) and division.ranks > 1:
        refuse_sums(optimizer, torch.device(division.mesh.device_type))

    def converted(
        state_dict: dict[str, Any], change: Callable[[Tensor, object], object], *, only_kept: bool
    ) -> dict[str, Any]:
        """Returns a state dict with `change` applied to the divided states, without those of other ranks if `only_kept`."""
        parameters = parameters_by_number(optimizer, state_dict)
        states = type(state_dict["state"])()  # may be marked already, by another division
        for number, state in state_dict["state"].items():
            parameter = parameters.get(number)
            if parameter is None or not division.covers(parameter):
                states[number] = state
            elif division.keeps(parameter) or not only_kept:
                states[number] = {key: change(parameter, value) for key, value in state.items()}
        return {**state_dict, "state": states}

    answer_for_whole_tensors()  # which tells, or refuses, where one rank's file is taken for the whole
    optimizer.register_state_dict_post_hook(lambda _, state: converted(state, division.join, only_kept=False))
    if isinstance(division, ByParameters):
        mark_states(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: converted(state, division.split, only_kept=True))
    # So are those that it has already, and not whatever else it keeps in `state`.
    division.divide_states(optimizer, list(optimizer.state))
    divide(optimizer, division)
    adapter.swap(division.stepping)


def _mixed_alone(operation: str) -> TrainError:
    return TrainError(
        "optimizer-mixed",
        f"`{operation}` got a tensor of which each rank has a part, and a whole one, in the step of an optimizer.",
        why="each rank steps some of the parameters, so that the others do not take part in this operation",
        fix="keep such tensors in `self.state[parameter]`, which is whole in a step; or write `elementwise = True` into "
        "the class of the optimizer, if it treats each element by itself",
    )
