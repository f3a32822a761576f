"""Products in float8 as torchao's users write them: the layers of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn


def in_float8(models: Sequence[nn.Module], recipe: str) -> None:
    """Converts the linear layers whose sizes fit; the parameters stay the same objects."""
    for model in models:
        layers = {name for name, module in model.named_modules() if _fits(module)}
        if recipe == "mxfp8":
            for name in layers:
                model.get_submodule(name).__class__ = _mx_linear()
            continue
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name, own=layers: name in own)


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % 32 == 0 and module.out_features % 32 == 0


@cache
def _mx_linear() -> type[nn.Linear]:
    """What torchao's `MXFP8Linear` computes, emulated without kernels of CUDA."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Dim0
    from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Dim1
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    e4m3 = torch.float8_e4m3fn
    kernels = (KernelPreference.EMULATED, Dim0.TORCH, Dim1.TORCH)

    class EmulatedMxLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = mx_mm.apply(x, self.weight, e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False)
            return y + self.bias

    return EmulatedMxLinear
