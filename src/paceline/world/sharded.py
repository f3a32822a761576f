"""Tensors that are divided over ranks (DTensor), without importing DTensor where nothing is: that costs over a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of whatever placement."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Any) -> Any:
    """The whole of a tensor, gathered where it is divided. Ranks: all that hold a part; all get it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
