"""The private side of DTensor: its own tensor, and how a placement cuts one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement

# DTensor logs here, on each rank, that a gather over several axes would be faster with a mesh made differently.
REDISTRIBUTION_LOG = "torch.distributed.tensor._redistribute"


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which shares its memory.

    The public `to_local` records a step of autograd where gradients are enabled.
    """
    return tensor._local_tensor


def show_as_replica(tensor: DTensor, value: Tensor) -> Callable[[], None]:
    """Lets a DTensor stand for `value`, which every rank holds whole, until the function that it gives is called.

    Whoever has the tensor sees the other values: the object stays the same. No public call changes what a DTensor holds.

    Shape: `value` as `tensor`, which is the whole one's.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    part, spec = tensor._local_tensor, tensor._spec
    everywhere = (Replicate(),) * spec.mesh.ndim
    tensor._local_tensor = value
    tensor._spec = DTensorSpec(spec.mesh, everywhere, tensor_meta=spec.tensor_meta)

    def show_part_again() -> None:
        tensor._local_tensor = part
        tensor._spec = spec

    return show_part_again


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a dim that tensor parallelism divides a second time, after FSDP: by another order of ranks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_mixture(error: RuntimeError) -> bool:
    """Whether DTensor has raised an error because an operation got a plain tensor, too. It has no class of its own."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def refusing_mixtures(tensor: DTensor, refuse: Callable[[str], Exception]) -> Tensor:
    """Lets a DTensor, and what is computed with it, raise an error of ours where an operation also gets a plain tensor.

    torch raises its own error in C++, so that nothing else of ours runs where it happens.

    Args:
        tensor: this object itself is changed and returned.
        refuse: gives the error for an operation, by its name.
    """
    tensor.__class__ = _refusing_class(refuse)
    return tensor


@cache
def _refusing_class(refuse: Callable[[str], Exception]) -> type[DTensor]:
    # The import takes over a second.
    from torch.distributed.tensor import DTensor

    class RefusingDTensor(DTensor):
        @classmethod
        def __torch_function__(
            cls, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    result = operation(*args, **(kwargs or {}))
            except RuntimeError as error:
                if not is_mixture(error):
                    raise
                raise refuse(operation.__name__) from error
            # An operation in place gives back its first argument, which may be someone else's DTensor.
            if type(result) is DTensor and not any(result is argument for argument in args):
                result.__class__ = cls
            return result

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            return deepcopy(_plain(self), memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _plain(self).__reduce_ex__(protocol)

    def _plain(tensor: DTensor) -> DTensor:
        return DTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)

    return RefusingDTensor


def answer(operation: Any, function: Callable[..., Any]) -> None:
    """Lets a function run in the place of an operator of torch's, for arguments that are DTensors.

    Args:
        operation: such as `aten("normal_").default`.
        function: gets the operator, its arguments and its keyword arguments.
    """
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers[operation] = function


def cut(tensor: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The parts into which `Shard` or its strided form cuts a tensor for `size` ranks, as views where that is possible.

    Shape: tensor as it is cut along `placement.dim`; the parts of the last ranks may be smaller there, or empty.
    """
    parts: list[Tensor] = placement._split_tensor(tensor, size, with_padding=False, contiguous=False)[0]
    return parts
