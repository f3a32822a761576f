"""What `fp8` does to a model: its linear layers stay, and multiply in float8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.base.errors import PlanError
from paceline.base.log import warn_once
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.world.forward import override_forward, restore_forward
from paceline_large.float8.float8_products import product_by
from paceline_large.float8.fp8 import RECIPES, STRATEGY, Float8Options
from paceline_large.products import give_product, linear, take_product

_OLDEST_CUDA = (8, 9)  # Ada; Hopper is 9.0


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Lets the chosen layers multiply in float8. Nothing is communicated.

    Raises:
        PlanError: `fp8-device`.
    """
    options: Float8Options = context.options
    recipe = RECIPES[options.recipe]
    _check_device(context.device)
    if recipe.depends and context.plan.layout.size() > 1:
        warn_once(
            "parallel",
            f"fp8.recipe={options.recipe}: {recipe.numbers}. For those of one process use "
            "--option fp8.recipe=rowwise_with_gw_hp.",
        )
    product = product_by(options.recipe, recipe.rows, context.device)
    chosen = set(STRATEGY.choose(context.plan, context.facts).layers)
    # A rank of a pipeline lacks some.
    layers = [module for name, module in model.named_modules(remove_duplicate=False) if name in chosen]
    for layer in layers:
        give_product(layer, product)
        override_forward(layer, "fp8", _forward)
    return Float8Layers(model, layers)


class Float8Layers(AppliedStrategy):
    """A model with layers that multiply in float8."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__(model)
        self._layers = layers

    def release(self) -> None:
        """Lets the layers multiply as torch does."""
        for layer in self._layers:
            take_product(layer)
            restore_forward(layer, "fp8")


def _forward(layer: nn.Module, original: Callable[..., Tensor], input: Tensor) -> Tensor:
    return linear(layer, input, layer.weight, layer.bias)  # type: ignore[arg-type]


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CUDA:
        raise PlanError(
            "fp8-device",
            f"{torch.cuda.get_device_name(device)} cannot multiply in float8.",
            why=f"its compute capability is {'.'.join(map(str, capability))}; mixed_precision=fp8 needs 8.9 (Ada, Hopper)",
            fix="use mixed_precision='bf16'",
        )
