"""Float8: the losses of torchao in plain PyTorch, under each plan; and what the plan says of the number of processes is measured.

The reference is a loop without Paceline: torchao's own layers in the place of those that the plan chose, whole batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from parity_models import GPT, loss_of
from torch import nn

from paceline.testing import run_ranks

pytest.importorskip("torchao")

STEPS = 4
ROWS, LENGTH = 8, 16  # 64 rows of activations for each of two ranks
RECIPES = ("rowwise_with_gw_hp", "mxfp8", "rowwise", "tensorwise")
Numbers = tuple[list[float], dict[str, torch.Tensor]]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = GPT(layers=2, width=64, heads=4)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 24, (ROWS, LENGTH), generator=generator)


class MxLinear(nn.Linear):
    """What torchao's `MXFP8Linear` computes, emulated without kernels of CUDA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Dim0
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Dim1
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        e4m3 = torch.float8_e4m3fn
        kernels = (KernelPreference.EMULATED, Dim0.TORCH, Dim1.TORCH)
        y = mx_mm.apply(x, self.weight, e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False)
        return y + self.bias


def convert(model: nn.Module, recipe: str) -> nn.Module:
    """Converts all linear layers of the blocks as torchao's users do."""
    if recipe == "mxfp8":
        for block in model.blocks:
            for module in block.modules():
                if type(module) is nn.Linear:
                    module.__class__ = MxLinear
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.startswith("blocks."))


@cache
def plain(recipe: str, parts: int = 1) -> Numbers:
    """torchao in plain PyTorch on one process; each batch in so many parts."""
    model, optimizer = model_and_optimizer()
    convert(model, recipe)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for tokens in tokens_of(step).chunk(parts):
            loss = loss_of(model(tokens), tokens.roll(1, 1)) / parts
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def ours(recipe: str, plan: dict[str, Any], settings: dict[str, Any] | None = None) -> Numbers:
    """The same loop through `Accelerator`."""
    from paceline import Accelerator

    model, optimizer = model_and_optimizer()
    options = {"fp8": {"recipe": recipe}, "compile": {"backend": "aot_eager"}}
    accelerator = Accelerator("fp8", plan=plan, options=options, cpu=True, **(settings or {}))
    model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step).chunk(layout.width)[layout.data_index(accelerator.process_index)]
        if layout.pp > 1:
            loss = accelerator.forward_backward(
                model, (tokens, tokens.roll(1, 1)), loss_of
            )
        else:
            loss = loss_of(model(tokens), tokens.roll(1, 1))
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, accelerator.get_state_dict(model)
