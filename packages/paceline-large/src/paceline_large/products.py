"""Which function multiplies in a linear layer: torch's, or one in float8.

`fp8` gives layers one of its own, and torchao's own float8 layers bring theirs. Tensor parallelism replaces the forward of a
layer, and asks here how this layer multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PRODUCT = "_paceline_product"


# Multiplies inputs by weights. Shape: [rows, features in], weight [features out, features in], result [rows, features out].
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def give_product(layer: nn.Module, product: Product) -> None:
    """Lets a layer multiply by this function."""
    setattr(layer, _PRODUCT, product)


def take_product(layer: nn.Module) -> None:
    """Lets a layer multiply as torch does."""
    vars(layer).pop(_PRODUCT, None)


def product_of(layer: nn.Module) -> Product | None:
    """Returns the function that a layer multiplies by; None if it is torch's own."""
    own: Product | None = vars(layer).get(_PRODUCT)
    if own is not None:
        return own
    # Known by name: torchao is imported only where it is used, and then the class is there already.
    if type(layer).__name__ == "Float8Linear":
        from paceline_large.float8.float8_products import product_of_layer

        return product_of_layer(layer)
    return None


def linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes what `F.linear` does, by the product of a layer.

    Shape: x [..., features in], weight [features out, features in], bias [features out]; returns [..., features out].
    """
    product = product_of(layer)
    if product is None:
        return F.linear(x, weight, bias)
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        # As autocast does for `F.linear`. torchao does so on CUDA alone, and for the input alone.
        dtype = torch.get_autocast_dtype(device_type)
        x = x.to(dtype)
        weight = weight.to(dtype)
    y = product(x.reshape(-1, x.shape[-1]), weight)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    if bias is None:
        return y
    return y + bias.to(y.dtype)
