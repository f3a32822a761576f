"""The private side of DTensor: what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


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
