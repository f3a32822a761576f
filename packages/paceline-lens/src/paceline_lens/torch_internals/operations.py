"""The private side of the operations that a mode of torch's dispatcher sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from paceline.torch_internals.dispatch import Operation


def is_in_fake_mode() -> bool:
    """Whether torch works out a shape for itself at the moment, under a `FakeTensorMode` that is entered."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_wrapper(types: Iterable[type]) -> bool:
    """Whether one of the classes that a mode was given wraps other tensors, as DTensor does."""
    return any(is_traceable_wrapper_subclass_type(kind) for kind in types)


def overloads_of(operation: Operation) -> Any:
    """The operation without its overload, as torch's table of formulas knows it."""
    return getattr(operation, "_overloadpacket", operation)


def taken_apart(operation: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a composite operation gives, run as its parts; NotImplemented where it has none."""
    if isinstance(operation, torch._ops.OpOverload) and operation._can_decompose():
        return operation.decompose(*args, **kwargs)
    return NotImplemented


def is_view(operation: Operation) -> bool:
    """Whether what an operation returns is only another look at the memory of what it was given."""
    return any(value.alias_info is not None and not value.alias_info.is_write for value in operation._schema.returns)


def argument(operation: Operation, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the argument that an operation got under this name; None if it got or has none."""
    if name in kwargs:
        return kwargs[name]
    for number, described in enumerate(operation._schema.arguments):
        if described.name == name and number < len(args):
            return args[number]
    return None


def group_ranks(args: Iterable[Any]) -> list[int]:
    """The ranks of the group that a collective operation was given, as an object or (last of all words) by name."""
    names: list[str] = []
    for argument in args:
        if isinstance(argument, str):
            names.append(argument)
        elif isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    return dist.get_process_group_ranks(torch._C._distributed_c10d._resolve_process_group(cast(Any, names[-1])))
