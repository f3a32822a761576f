"""`Witness`: sees every operation of a run, keeps the books, and (in a rehearsal) lets tensors have a shape and no values.

In a rehearsal a tensor that an operation returns is

    fake      where a fake tensor went in: shapes, dtypes and memory as of a real one, without any computation
    fake      where nothing went in and it is large, inside a module's `__init__` or after the first `prepare`
    real      otherwise: the user's data, indices and samplers stay what they are

so a script of its own accord runs on, and a model of any size is built in seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from paceline.planner.ledger import Ledger
from paceline.torch_internals.fake import fake_like

LARGE = 1024  # elements; smaller tensors cost nothing, and their values are often looked at
_aten = torch.ops.aten
_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass
class Traffic:
    """What one rank computed and sent.

    Attributes:
        flops: floating-point operations.
        sent: bytes over all links, by (operation, ranks of the group, whether the group spans several nodes).
    """

    flops: float = 0.0
    sent: dict[tuple[str, int, bool], int] = field(default_factory=dict)

    def total(self, across: bool | None = None) -> int:
        """Bytes sent in groups that span nodes (True), that do not (False), or in all."""
        return sum(count for (_, _, wide), count in self.sent.items() if across is None or wide == across)


class Witness(TorchDispatchMode):
    """Watches what runs while it is active.

    Args:
        ledger: where memory is entered.
        fakes: makes fake tensors; None watches a real run.
        local_size: ranks on one node.

    Attributes:
        traffic: what was computed and sent so far.
        live: whether large new tensors are fake everywhere, as after `prepare`.
    """

    def __init__(self, ledger: Ledger, fakes: FakeTensorMode | None = None, local_size: int = 1) -> None:
        super().__init__()
        self.ledger, self.fakes, self.local_size = ledger, fakes, local_size
        self.traffic = Traffic()
        self.live = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: its parts come by again
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # torch works out some shape for itself
        given = [*_tensors(args), *_tensors(kwargs.values())]
        result = self._run(func, given, args, kwargs)
        made = _tensors((result,))
        if self.fakes is None or any(isinstance(each, FakeTensor) for each in (*given, *made)):
            self._note(func, args, kwargs, result, given, made)
        return result

    def _run(self, func: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if self.fakes is None:
            return func(*args, **kwargs)
        if any(isinstance(each, FakeTensor) for each in given):
            if func in _LOOKS:
                return False if given[0].dtype == torch.bool else 0.0 if given[0].dtype.is_floating_point else 0
            if func in _VIEWS and isinstance(given[0], FakeTensor) and len(given) == 1:
                with in_kernel_invocation_manager(self.fakes):  # as torch does it, without looking for a cached answer
                    seen = func(*args, **kwargs)
                return FakeTensor(self.fakes, seen, given[0].device)
            if func in _FILLS and isinstance(args[0], FakeTensor):
                return args[0]
            if func is _aten.index.Tensor:
                args = (args[0], _positions(args[1]))
            if func.name().startswith("aten::_fused_") and func.name().endswith("_"):
                return None  # an optimizer's kernel that works in place; not all of them know fake tensors
            return func(*args, **kwargs)
        if given or kwargs.get("device") == torch.device("meta") or not (self.live or _in_module_init()):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:  # somebody wants these very numbers
            return func(*args, **kwargs)
        with self.fakes:
            tried = func(*args, **kwargs)
        large = isinstance(tried, torch.Tensor) and tried.numel() >= LARGE
        return tried if large else func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Any], made: list[Any]) -> None:
        for tensor in made:
            if self.fakes is None or isinstance(tensor, FakeTensor):
                self.ledger.enter(tensor)
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional", "_dtensor::")):
            self._send(name, args, result, [*given, *made])
        elif (formula := _FLOPS.get(func._overloadpacket)) is not None:
            self.traffic.flops += formula(*args, **kwargs, out_val=result)

    def _send(self, name: str, args: Any, result: Any, tensors: list[Any]) -> None:
        operation = name.split("::")[1].split(".")[0].strip("_")
        fraction = next((share for word, share in _SHARES.items() if word in operation), None)
        if fraction is None or not tensors:
            return
        kept = [each for each in tensors if self.fakes is None or isinstance(each, FakeTensor)]
        self.ledger.label(kept, "communication")
        whole = max(_bytes(each) for each in (*args, result))
        ranks = _group_ranks(args)
        wide = len({rank // self.local_size for rank in ranks}) > 1
        key = (operation, len(ranks), wide)
        self.traffic.sent[key] = self.traffic.sent.get(key, 0) + int(fraction(len(ranks)) * whole)

    # -- making things fake ----------------------------------------------------------------------------------

    def fake(self, tree: Any) -> Any:
        """A structure with each tensor replaced by a fake one of its form."""
        return tree_map_only(torch.Tensor, self._fake, tree)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.fakes is not None
        if isinstance(tensor, FakeTensor):
            return tensor
        made = fake_like(tensor, self.fakes)
        self.ledger.enter(made)
        return made

    def fake_module(self, model: nn.Module) -> None:
        """Makes parameters and buffers of a model fake, those that still are real; they stay the same objects."""
        for tensor in {id(each): each for each in (*model.parameters(), *model.buffers())}.values():
            if not isinstance(tensor, FakeTensor):
                made = self._fake(tensor.detach())
                made.requires_grad_(tensor.requires_grad)
                if isinstance(tensor, nn.Parameter):
                    made._is_param = True  # type: ignore[attr-defined]
                torch.utils.swap_tensors(tensor, made)

    @contextmanager
    def away(self) -> Iterator[None]:
        """While it is open, nothing is seen and nothing becomes fake."""
        with torch.utils._python_dispatch._disable_current_modes():
            yield


# Operations that look at a value; torch takes the latter two apart itself, but not in inference mode.
_LOOKS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)


# Strategies that divide every parameter over many ranks make millions of these: they take a short way.
_VIEWS = {
    _aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten._unsafe_view.default, _aten.detach.default,
    _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.as_strided.default,
}  # fmt: skip
_FILLS = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, those in lists too."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)) and value:
            found += _tensors(value)
    return found


def _positions(indices: Any) -> list[Any]:
    """Indices in which masks whose values are known have become positions: how many there are is then known too."""
    found: list[Any] = []
    for each in indices:
        known = isinstance(each, torch.Tensor) and each.dtype == torch.bool and not isinstance(each, FakeTensor)
        found += each.nonzero().unbind(1) if known else [each]
    return found


def _in_module_init() -> bool:
    """Whether some module is being constructed right now."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _flash(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _flash_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_FLOPS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash,  # torch's own table lacks the CPU's kernels
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}

# What each rank sends of the whole, in the ring forms of these operations on n ranks.
_SHARES: dict[str, Any] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "send": lambda n: 1,
}


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _group_ranks(args: Any) -> list[int]:
    """The ranks of the group that a collective operation was given, as an object or (last of all words) by name."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
    names = [each for each in args if isinstance(each, str)]
    return dist.get_process_group_ranks(torch._C._distributed_c10d._resolve_process_group(names[-1]))
