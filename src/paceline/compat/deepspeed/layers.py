"""What a `PipelineModule` does with single layers: share them, tie them, and give up the values of those held elsewhere."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import PrepareError


class Function(nn.Module):
    """A layer that is a plain function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, hidden: Any) -> Any:
        return self._function(hidden)


class Tied(nn.Module):
    """A tied layer with a forward of its own (an embedding that serves as head)."""

    def __init__(self, layer: nn.Module, forward_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._forward_fn = forward_fn

    def forward(self, hidden: Any) -> Any:
        return self._forward_fn(self.layer, hidden)


def sharing(module: nn.Module, twins: dict[int, nn.Module] | None = None) -> nn.Module:
    """Another module with the very parameters and buffers of `module`, so that it can stand in another stage too."""
    twins = {} if twins is None else twins
    if id(module) not in twins:
        twin = twins[id(module)] = copy.copy(module)
        for name in ("_parameters", "_buffers"):
            twin.__dict__[name] = dict(getattr(module, name))
        twin.__dict__["_modules"] = {
            name: None if child is None else sharing(child, twins) for name, child in module._modules.items()
        }
    return twins[id(module)]


def tie(layer: nn.Module, first: nn.Module, names: Sequence[str], key: str) -> None:
    """Gives `layer` the parameters of `first` under `names`.

    Raises:
        PrepareError: `pipe-tied`.
    """
    for name in names:
        holder, _, own = name.rpartition(".")
        try:
            source, target = first.get_parameter(name), layer.get_parameter(name)
        except AttributeError:
            source = target = None  # type: ignore[assignment]
        if source is None or target is None or source.shape != target.shape:
            why = []
            for module in (first, layer):
                shapes = [f"{n} {list(parameter.shape)}" for n, parameter in module.named_parameters()]
                why.append(f"{type(module).__name__} has {', '.join(shapes) or 'no parameters'}")
            raise PrepareError(
                "pipe-tied",
                f"layers of the key {key!r} cannot share {name!r}.",
                why=why,
                fix="name weights that both have, in the same shape: tied_weight_attr=['embed.weight']",
            )
        layer.get_submodule(holder)._parameters[own] = source


def trim() -> None:
    """Gives memory that was freed back to the system. glibc keeps aligned blocks below 32 MB, and does not use them again."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)


def give_up(layers: Iterable[nn.Module], kept_layers: Iterable[nn.Module]) -> None:
    """Puts tensors of names and shapes alone in the place of those of `layers`, except what `kept_layers` share with them."""
    stays = {id(tensor) for layer in kept_layers for tensor in (*layer.parameters(), *layer.buffers())}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # by id, so the old one must live as long
    for module in (inner for layer in layers for inner in layer.modules()):
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or tensor.is_meta or id(tensor) in stays:
                    continue
                if id(tensor) not in replaced:
                    empty: Any = torch.empty_like(tensor, device="meta", requires_grad=False)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, tensor.requires_grad)
                        empty.__dict__.update(tensor.__dict__)
                    replaced[id(tensor)] = (tensor, empty)
                slots[name] = replaced[id(tensor)][1]  # type: ignore[assignment]
