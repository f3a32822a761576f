"""Products in float8: the only module that imports torchao for them.

Both functions of torchao are differentiable, and choose the kernels of the device; on a CPU float8 products are torch's own
and those of MX blocks are emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MX_BLOCK = 32
_BLACKWELL = (10, 0)  # the first CUDA devices that multiply MX blocks


def product_by(recipe: str, rows: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the product of a recipe.

    Args:
        recipe: a name of `fp8.RECIPES`.
        rows: inputs are filled up to a multiple of so many rows.
        device: where it computes.
    """
    if recipe == "mxfp8":
        return _MxProduct(rows, is_emulated=not multiplies_blocks(device))
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    # A layer without values derives the configuration of the three products from it.
    layer = Float8Linear(_MX_BLOCK, _MX_BLOCK, bias=False, device="meta", config=config)
    return _Float8Product(rows, layer.linear_mm_config, config)


def product_of_layer(layer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the product of a float8 layer of torchao."""
    return _Float8Product(1, layer.linear_mm_config, layer.config)


def multiplies_blocks(device: torch.device) -> bool:
    """Returns whether a device multiplies MX blocks; otherwise they are emulated."""
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _BLACKWELL
    )


@dataclass(frozen=True)
class _Float8Product:
    """A product by `torchao.float8`.

    Attributes:
        rows: inputs are filled up to a multiple of so many rows.
        products: torchao's configuration of the products of the output and of both gradients.
        config: torchao's configuration of the scales.
    """

    rows: int
    products: Any
    config: Any

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        y: Tensor = matmul_with_hp_or_float8_args.apply(_filled(x, self.rows), weight.t(), self.products, self.config)
        return y if len(y) == len(x) else y[: len(x)]


@dataclass(frozen=True)
class _MxProduct:
    """A product of MX blocks."""

    rows: int
    is_emulated: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        kernels = (KernelPreference.AUTO, MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.CUDA)
        if self.is_emulated:
            kernels = (KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
        float8 = torch.float8_e4m3fn
        x_filled = _filled(x, self.rows).contiguous()
        y: Tensor = mx_mm.apply(
            x_filled,
            weight.contiguous(),
            float8,
            float8,
            float8,
            _MX_BLOCK,
            *kernels,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return y if len(y) == len(x) else y[: len(x)]


def _filled(x: Tensor, multiple: int) -> Tensor:
    """Returns the input with rows of zeros at its end, which change no scale and add nothing to a gradient."""
    missing = -len(x) % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x
