"""`OperationTrace`: sees every operation of a rehearsal, and enters its memory, arithmetic and communication.

It lets tensors have a shape and no values. A tensor that an operation returns is

    fake      where a fake tensor went in: shapes, dtypes and memory as of a real one, without any computation
    fake      where nothing went in and it is large, inside a module's `__init__` or after the first `prepare`
    real      otherwise: the user's data, indices and samplers stay what they are

so a script runs on as it is, and a model of any size is built in seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.observe.flops import formulas
from paceline.planner.allocation_trace import AllocationTrace
from paceline.planner.work import Computation, Message, Work
from paceline.torch_internals import dispatch
from paceline.torch_internals.dispatch import Operation
from paceline.torch_internals.fake import FakeTensor, FakeTensorMode, fake_view, make_fake
from paceline.world.tree import tensors as tensors_in

LARGE = 1024  # elements; smaller tensors cost nothing, and their values are often looked at
_aten = torch.ops.aten

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass
class Traffic:
    """What one rank computed and sent.

    Attributes:
        flops: floating-point operations.
        sent: bytes over all links, by (operation, ranks of the group, whether the group spans several nodes).
        work: every operation and message, for forecasts of its time.
    """

    flops: float = 0.0
    sent: dict[tuple[str, int, bool], int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)

    def add(self, operation: str, ranks: int, across: bool, count: int) -> None:
        """Enters bytes that were sent."""
        key = (operation, ranks, across)
        self.sent[key] = self.sent.get(key, 0) + count

    def total(self, across: bool | None = None) -> int:
        """Bytes sent in groups that span nodes (True), that do not (False), or in all."""
        total = 0
        for (_, _, spans_nodes), count in self.sent.items():
            if across is None or spans_nodes == across:
                total += count
        return total


class OperationTrace(dispatch.TorchDispatchMode):
    """Sees what runs while it is entered.

    Args:
        allocations: where memory is entered.
        fakes: makes fake tensors.
        local_size: ranks on one node.

    Attributes:
        traffic: what was computed and sent so far.
        fakes_everywhere: whether large new tensors are fake in all code, as after `prepare`.
        in_optimizer: whether an optimizer's step runs.
    """

    def __init__(self, allocations: AllocationTrace, fakes: FakeTensorMode, local_size: int = 1) -> None:
        super().__init__()
        self.allocations = allocations
        self.traffic = Traffic()
        self.fakes_everywhere = False
        self.in_optimizer = False
        self._fakes = fakes
        self._local_size = local_size

    def __torch_dispatch__(
        self, operation: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if dispatch.has_wrapper(types):
            return NotImplemented  # a DTensor: its parts come by again
        if dispatch.is_in_fake_mode():
            return operation(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        result = self._run(operation, given, args, kwargs)
        new_fakes = _fakes_among(_tensors((result,)))
        fakes = [*_fakes_among(given), *new_fakes]
        if fakes:
            for tensor in new_fakes:
                self.allocations.enter(tensor)
            self._enter_work(operation, args, kwargs, result, given)
        return result

    def _run(self, operation: Operation, given: list[torch.Tensor], args: Arguments, kwargs: Keywords) -> object:
        if _fakes_among(given):
            return self._run_on_fakes(operation, given, args, kwargs)
        is_constructor = not given and kwargs.get("device") != torch.device("meta")
        if not is_constructor or not (self.fakes_everywhere or _in_module_init()):
            return operation(*args, **kwargs)
        if kwargs.get("generator") is not None:  # somebody wants these very numbers
            return operation(*args, **kwargs)
        with self._fakes:
            fake = operation(*args, **kwargs)
        if isinstance(fake, torch.Tensor) and fake.numel() >= LARGE:
            return fake
        return operation(*args, **kwargs)

    def _run_on_fakes(
        self, operation: Operation, given: list[torch.Tensor], args: Arguments, kwargs: Keywords
    ) -> object:
        first = given[0]
        if operation in _LOOKS:
            return _zero(first.dtype)
        if operation in _VIEWS and isinstance(first, FakeTensor) and len(given) == 1:
            return fake_view(operation, first, self._fakes, args, kwargs)
        if operation in _FILLS and isinstance(args[0], FakeTensor):
            return args[0]
        if operation is _aten.index.Tensor:
            args = (args[0], _positions(args[1]))
        name = operation.name()
        if name.startswith("aten::_fused_") and name.endswith("_"):
            return None  # an optimizer's kernel that works in place; not all of them know fake tensors
        return operation(*args, **kwargs)

    def _enter_work(
        self, operation: Operation, args: Arguments, kwargs: Keywords, result: object, given: list[torch.Tensor]
    ) -> None:
        name = operation.name()
        returned = _tensors((result,))
        if name.startswith(("c10d::", "_c10d_functional", "_dtensor::")):
            self._enter_communication(name, args, result, _fakes_among([*given, *returned]))
            return
        formula = formulas().get(dispatch.overloads_of(operation))
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        self.traffic.flops += flops
        # Kernels of optimizers return nothing.
        written = returned or _tensors(dispatch.written_arguments(operation, args, kwargs))
        if not written:
            return  # it only asked for a property, such as `prim::device`
        moved = 0
        if not dispatch.is_view(operation) and dispatch.overloads_of(operation) not in _ALLOCATIONS:
            read = written if dispatch.overloads_of(operation) in _LOOKUPS else given
            moved = _bytes_of(read) + _bytes_of(written)
        dtype = str((given or returned)[0].dtype).removeprefix("torch.")
        self.traffic.work.computations[Computation(self._phase, dtype, flops, moved)] += 1

    @property
    def _phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        return "backward" if dispatch.is_in_backward_pass() else "forward"

    def _enter_communication(self, name: str, args: Arguments, result: object, buffers: list[FakeTensor]) -> None:
        operation = name.split("::")[1].split(".")[0].strip("_")
        word = next((word for word in _SHARES if word in operation), None)
        if word is None:
            return
        self.allocations.label(buffers, "communication")
        whole = max(_bytes(value) for value in (*args, result))
        ranks = dispatch.group_ranks(args)
        across = len({rank // self._local_size for rank in ranks}) > 1
        count = int(_SHARES[word](len(ranks)) * whole)
        self.traffic.add(operation, len(ranks), across, count)
        message = Message(self._phase, word.replace("_", ""), len(ranks), across, count)
        self.traffic.work.messages[message] += 1

    def fake_module(self, model: nn.Module) -> None:
        """Makes parameters and buffers of a model fake, those that still are real; they stay the same objects."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, FakeTensor):
                self.allocations.enter(make_fake(tensor, self._fakes))

    def paused(self) -> AbstractContextManager[Any]:
        """While it is open, nothing is seen and nothing becomes fake."""
        return dispatch.without_modes()


# Operations that look at a value; torch takes the latter two apart itself, but not in inference mode.
_LOOKS = (dispatch.aten("_local_scalar_dense").default, _aten.item.default, _aten.is_nonzero.default)

# Strategies that divide every parameter over many ranks make millions of these: they take a short way.
_VIEWS = {
    _aten.slice.Tensor, _aten.select.int, _aten.view.default, dispatch.aten("_unsafe_view").default, _aten.detach.default,
    _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.as_strided.default,
}  # fmt: skip
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
# They read no more of a table than they write.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
_FILLS = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}


def _fakes_among(tensors: Iterable[torch.Tensor]) -> list[FakeTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]


def _zero(dtype: torch.dtype) -> bool | float | int:
    """What a script reads where it looks at a value that nobody computed."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, those in lists too; it runs for each operation."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and value:
            tensors += _tensors(value)
    return tensors


def _positions(indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices in which masks whose values are known have become positions: how many there are is then known too."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            positions.append(index)
        else:
            positions += index.nonzero().unbind(1)
    return positions


def _in_module_init() -> bool:
    """Whether some module is being constructed right now."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_all_but_own(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all(ranks: int) -> float:
    return 1


# What each rank sends of the whole, in the ring forms of these operations: an all-reduce is a reduce-scatter and then an
# all-gather.
_SHARES: dict[str, Callable[[int], float]] = {
    "allreduce": _twice_all_but_own,
    "all_reduce": _twice_all_but_own,
    "reduce_scatter": _all_but_own,
    "allgather": _all_but_own,
    "all_gather": _all_but_own,
    "alltoall": _all_but_own,
    "all_to_all": _all_but_own,
    "broadcast": _all,
    "reduce": _all,
    "send": _all,
}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors take in memory; those of a tensor that repeats itself (`expand`) once."""
    count = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        count += min(size, tensor.untyped_storage().nbytes())
    return count


def _bytes(value: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
