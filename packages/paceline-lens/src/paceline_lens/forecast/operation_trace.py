"""`OperationTrace` records the memory, arithmetic and communication of every operation of a rehearsal (`rehearsal.py`).

During a rehearsal large tensors are fake: they have a shape, a dtype and a size, but no values, and nothing is computed. So a
script runs as it is, and a model of any size is built in seconds. A tensor that an operation returns is

    fake      if the operation takes a fake tensor
    fake      if the operation takes no tensor and the result is large: inside a module's `__init__`, or after the first
              `prepare`
    real      otherwise: the user's data, indices and samplers keep their values
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn

from paceline.torch_internals import dispatch
from paceline.torch_internals.dispatch import Operation
from paceline.world.sharded import plain_tensors
from paceline.world.tree import tensors as tensors_in
from paceline_lens.forecast.allocation_trace import AllocationTrace
from paceline_lens.forecast.joined import JoinedBytes
from paceline_lens.forecast.work import Computation, Message, Work
from paceline_lens.observe.flops import formulas
from paceline_lens.torch_internals import operations
from paceline_lens.torch_internals.fake import FakeTensor, FakeTensorMode, fake_view, make_fake

LARGE = 1024  # elements; smaller tensors cost nothing, and their values are often looked at
_aten = torch.ops.aten

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class OperationTrace(dispatch.TorchDispatchMode):
    """Records the operations that run while it is entered as a context manager.

    Args:
        allocations: the trace to which the memory of tensors is added.
        fakes: the mode that makes fake tensors.
        local_size: the number of ranks on one node.

    Attributes:
        work: what was computed and sent so far.
        fakes_everywhere: whether large new tensors are fake in all code, and not only inside of modules. The rehearsal sets
            it after the first `prepare`.
        in_optimizer: whether an optimizer's step is running. The rehearsal sets it.
    """

    def __init__(self, allocations: AllocationTrace, fakes: FakeTensorMode, local_size: int = 1) -> None:
        super().__init__()
        self.allocations = allocations
        self.work = Work()
        self.fakes_everywhere = False
        self.in_optimizer = False
        self._fakes = fakes
        self._local_size = local_size
        self._joined = JoinedBytes()

    def __torch_dispatch__(
        self, operation: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if operations.has_wrapper(types):
            return NotImplemented  # a DTensor runs the operation on its local tensors, which come here again
        if operations.is_in_fake_mode():
            return operation(*args, **kwargs)
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        result = self._run(operation, inputs, args, kwargs)
        new_fakes = _fakes_among(_tensors((result,)))
        if new_fakes or _fakes_among(inputs):
            for tensor in new_fakes:
                self.allocations.enter(tensor)
            self._enter_work(operation, args, kwargs, result, inputs)
        return result

    def _run(self, operation: Operation, inputs: list[torch.Tensor], args: Arguments, kwargs: Keywords) -> object:
        """Runs an operation on fake or real tensors, as the docstring of this module says."""
        if _fakes_among(inputs):
            return self._run_on_fakes(operation, inputs, args, kwargs)
        is_constructor = not inputs and kwargs.get("device") != torch.device("meta")
        if not is_constructor or not (self.fakes_everywhere or _in_module_init()):
            return operation(*args, **kwargs)
        # A script that draws from a generator of its own, such as a sampler, needs the values.
        if kwargs.get("generator") is not None:
            return operation(*args, **kwargs)
        with self._fakes:
            fake = operation(*args, **kwargs)
        if isinstance(fake, torch.Tensor) and fake.numel() >= LARGE:
            return fake
        return operation(*args, **kwargs)

    def _run_on_fakes(
        self, operation: Operation, inputs: list[torch.Tensor], args: Arguments, kwargs: Keywords
    ) -> object:
        first = inputs[0]
        if operation in _VALUE_READS:
            return _zero(first.dtype)
        if operation in _VIEWS and isinstance(first, FakeTensor) and len(inputs) == 1:
            return fake_view(operation, first, self._fakes, args, kwargs)
        if operation in _FILLS and isinstance(args[0], FakeTensor):
            return args[0]
        if operation is _aten.index.Tensor:
            args = (args[0], _positions(args[1]))
        name = operation.name()
        if name.startswith("aten::_fused_") and name.endswith("_"):
            return None  # an optimizer's kernel, which works in place; not all of these kernels accept fake tensors
        return operation(*args, **kwargs)

    def _enter_work(
        self, operation: Operation, args: Arguments, kwargs: Keywords, result: object, inputs: list[torch.Tensor]
    ) -> None:
        name = operation.name()
        returned = _tensors((result,))
        if name.startswith(("c10d::", "_c10d_functional", "_dtensor::")):
            self._joined.of_others(inputs)
            self._enter_communication(name, args, result, _fakes_among([*inputs, *returned]))
            return
        formula = formulas().get(operations.overloads_of(operation))
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        is_attention = "scaled_dot_product" in name
        if is_attention and operations.argument(operation, "is_causal", args, kwargs):
            flops //= 2  # kernels leave out the blocks above the diagonal
        # Kernels of optimizers return nothing: they write into their arguments.
        written = returned or _tensors(dispatch.written_arguments(operation, args, kwargs))
        if not written:
            return  # the operation only returns a property, such as `prim::device`
        moved = 0
        joined = 0
        if not operations.is_view(operation) and operations.overloads_of(operation) not in _ALLOCATIONS:
            # A lookup reads no more of a table than it writes.
            is_lookup = operations.overloads_of(operation) in _LOOKUPS
            read = written if is_lookup else inputs
            moved = _bytes_of(read) + _bytes_of(written)
            if flops or is_lookup:
                joined = moved + self._joined.of_others(inputs)
            else:
                joined = self._joined.of_joined(name, self._phase, inputs, written, moved)
        if operation is _aten.embedding.default and self._phase == "forward":
            table, indices = args[:2]
            self.work.lookups[len(table)] += indices.numel()
        first = inputs[0] if inputs else written[0]
        dtype = str(first.dtype).removeprefix("torch.")
        computation = Computation(self._phase, dtype, flops, moved, is_attention, joined)
        self.work.computations[computation] += 1

    @property
    def _phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        return "backward" if dispatch.is_in_backward_pass() else "forward"

    def _enter_communication(self, name: str, args: Arguments, result: object, buffers: list[FakeTensor]) -> None:
        operation = name.split("::")[1].split(".")[0].strip("_")
        kind = next((kind for kind in _SENT_SHARES if kind in operation), None)
        if kind is None:
            return  # not a message, such as a wait for one
        self.allocations.label(buffers, "communication")
        # FSDP2 allocates these results on streams of its own.
        if operation in _OWN_STREAMS:
            for tensor in _fakes_among(_tensors(args[:1])):
                self.allocations.on_stream(tensor, operation)
        # The unsharded tensor is an argument of some collectives, and the result of others.
        whole_bytes = max(_bytes(value) for value in (*args, result))
        ranks = operations.group_ranks(args)
        across = len({rank // self._local_size for rank in ranks}) > 1
        sent_bytes = int(_SENT_SHARES[kind](len(ranks)) * whole_bytes)
        message = Message(self._phase, kind.replace("_", ""), len(ranks), across, sent_bytes, operation)
        self.work.messages[message] += 1

    def fake_module(self, model: nn.Module) -> None:
        """Makes those parameters and buffers of a model fake that are still real; they stay the same objects."""
        for tensor in (*model.parameters(), *model.buffers()):
            # What holds other tensors, such as a weight that is gathered in float8, keeps its kind.
            for part in plain_tensors(tensor).values():
                if not isinstance(part, FakeTensor):
                    self.allocations.enter(make_fake(part, self._fakes))

    def paused(self) -> AbstractContextManager[object]:
        """Returns a context in which nothing is recorded and nothing becomes fake."""
        return dispatch.without_modes()


# Operations that return the value of an element. torch decomposes the last two itself, except in inference mode.
_VALUE_READS = (dispatch.aten("_local_scalar_dense").default, _aten.item.default, _aten.is_nonzero.default)

# Strategies that divide every parameter over many ranks make millions of views: `fake_view` is a faster way for these.
_VIEWS = {
    _aten.slice.Tensor, _aten.select.int, _aten.view.default, dispatch.aten("_unsafe_view").default, _aten.detach.default,
    _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.as_strided.default,
}  # fmt: skip
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_OWN_STREAMS = ("allgather_base", "reduce_scatter_base")
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
_FILLS = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}


def _fakes_among(tensors: Iterable[torch.Tensor]) -> list[FakeTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]


def _zero(dtype: torch.dtype) -> bool | float | int:
    """Returns the value that a script gets if it reads an element of a fake tensor."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments of an operation, also those in lists. It is fast: it runs for each operation."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and value:
            tensors += _tensors(value)
    return tensors


def _positions(indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replaces boolean masks among indices by the positions of their True values.

    The shape of a fake result then follows from shapes alone. It cannot be done for a mask that is fake.
    """
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            positions.append(index)
        else:
            positions += index.nonzero().unbind(1)
    return positions


def _in_module_init() -> bool:
    """Returns whether the `__init__` of a module is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_all_but_own(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all(ranks: int) -> float:
    return 1


# The share of the unsharded tensor that each rank sends, in the ring algorithms of these operations: an all-reduce is a
# reduce-scatter and then an all-gather. The first name that is part of an operation's name counts, so that "reduce" comes
# after the names that contain it.
_SENT_SHARES: dict[str, Callable[[int], float]] = {
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
    """Returns the bytes that tensors take in memory. A tensor made by `expand` repeats its elements, which count once."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def _bytes(value: object) -> int:
    """Returns the bytes of all tensors in nested lists, tuples and dicts."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
