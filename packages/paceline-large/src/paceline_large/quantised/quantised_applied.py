"""What `quantised` does to a model: its 4-bit and 8-bit layers can be trained around, saved and loaded on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.parallel.data.averages import broadcast_tensors
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.facts import four_bit_statistics

# An attribute of bitsandbytes' 4-bit layers: whether evaluation may pack the weight for a kernel of its own.
_PACKS = "support_avx512bf16_for_cpu"


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Gives all ranks the statistics of the first, and readies the layers for training and loading. Ranks: all."""
    statistics: list[Tensor] = []
    handles: list[RemovableHandle] = []
    packing: list[nn.Module] = []
    for row in context.facts.quantised:
        layer = model.get_submodule(row.name.rpartition(".")[0])
        if row.kind == "4-bit":
            if getattr(layer, _PACKS, False):
                # A packed weight gives no gradient to its input. `state_dict` unpacks what an evaluation has packed before.
                layer.state_dict()
                setattr(layer, _PACKS, False)
                packing.append(layer)
            statistics += four_bit_statistics(_weight(layer).quant_state)
            handles.append(layer.register_load_state_dict_pre_hook(_take_four_bit))
        elif row.kind == "8-bit":
            row_maxima = _row_maxima(layer)
            if row_maxima is not None:
                statistics.append(row_maxima)
            handles.append(layer.register_load_state_dict_pre_hook(_take_eight_bit))
    if context.collectives.world.size > 1:
        broadcast_tensors([tensor for tensor in statistics if not tensor.is_meta], context.mesh.gradient_group)
    return QuantisedLayers(model, handles, packing)


class QuantisedLayers(AppliedStrategy):
    """A model with quantised layers.

    Args:
        model: the model.
        handles: of the hooks that were registered.
        packing: the layers that pack their weights in evaluation otherwise.
    """

    def __init__(self, model: nn.Module, handles: list[RemovableHandle], packing: list[nn.Module]) -> None:
        super().__init__(model)
        self._handles = handles
        self._packing = packing

    def release(self) -> None:
        """Leaves the layers as bitsandbytes made them."""
        for handle in self._handles:
            handle.remove()
        for layer in self._packing:
            setattr(layer, _PACKS, True)


def _weight(layer: nn.Module) -> Any:
    return layer.weight


def _row_maxima(layer: Any) -> Tensor | None:
    """Returns the maximum of each row of an 8-bit weight: at the weight, and after the first pass in the layer's state."""
    at_weight: Tensor | None = getattr(layer.weight, "SCB", None)
    if at_weight is not None or not hasattr(layer, "state"):
        return at_weight
    in_state: Tensor | None = layer.state.SCB
    return in_state


def _take_four_bit(
    layer: Any, state: dict[str, Any], prefix: str, _metadata: object, _strict: bool, missing: list[str], *_: object
) -> None:
    """A hook before `load_state_dict`: takes the statistics of a weight, which torch would call unexpected."""
    if f"{prefix}weight" not in state:
        return
    begin = f"{prefix}weight."
    values = {key.removeprefix(begin): state.pop(key) for key in list(state) if key.startswith(begin)}
    if not values:
        # The old statistics would turn the new bytes into other numbers.
        missing.append(f"{begin}absmax")
        return
    weight = layer.weight
    values = {key: value.detach() for key, value in values.items()}
    weight.quant_state = type(weight.quant_state).from_dict(values, weight.device)
    layer.quant_state = weight.quant_state


def _take_eight_bit(
    layer: Any, state: dict[str, Any], prefix: str, _metadata: object, _strict: bool, missing: list[str], *_: object
) -> None:
    """A hook before `load_state_dict`: takes the maxima of the rows, which bitsandbytes finds before the first pass only."""
    row_maxima = _row_maxima(layer)
    if f"{prefix}weight" not in state or row_maxima is None:
        return
    if f"{prefix}SCB" not in state:
        missing.append(f"{prefix}SCB")
        return
    row_maxima.copy_(state.pop(f"{prefix}SCB"))
