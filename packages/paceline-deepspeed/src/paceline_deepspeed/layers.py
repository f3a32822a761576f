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
from paceline.torch_internals.modules import buffer_table, child_table, parameter_table


class Function(nn.Module):
    """A layer that is a plain function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, hidden: object) -> Any:
        return self._function(hidden)


class Tied(nn.Module):
    """A tied layer with a forward of its own (an embedding that serves as head)."""

    def __init__(self, layer: nn.Module, forward_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._forward_fn = forward_fn

    def forward(self, hidden: object) -> Any:
        return self._forward_fn(self.layer, hidden)


def sharing(module: nn.Module, twins: dict[int, nn.Module] | None = None) -> nn.Module:
    """Makes another module with the very parameters and buffers of `module`, which can stand in another stage too."""
    # By the id of the module: one that stands at two places within `module` has one twin.
    if twins is None:
        twins = {}
    if id(module) not in twins:
        twin = copy.copy(module)
        twins[id(module)] = twin
        # `copy` gives the twin the very tables of the module, but what is put into one must not appear in the other.
        children: dict[str, nn.Module | None] = {}
        for name, child in child_table(module).items():
            children[name] = None  # as a module says that it has no such child
            if child is not None:
                children[name] = sharing(child, twins)
        tables = {
            "_parameters": dict(parameter_table(module)),
            "_buffers": dict(buffer_table(module)),
            "_modules": children,
        }
        twin.__dict__.update(tables)
    return twins[id(module)]


def tie(layer: nn.Module, first: nn.Module, names: Sequence[str], key: str) -> None:
    """Gives `layer` the parameters of `first` under `names`.

    Raises:
        PrepareError: `pipe-tied`.
    """
    for name in names:
        holder, _, own_name = name.rpartition(".")
        try:
            source = first.get_parameter(name)
            target = layer.get_parameter(name)
            has_both = source.shape == target.shape
        except AttributeError:
            has_both = False
        if not has_both:
            why = [f"{type(module).__name__} has {_shapes_of(module)}" for module in (first, layer)]
            raise PrepareError(
                "pipe-tied",
                f"layers of the key {key!r} cannot share {name!r}.",
                why=why,
                fix="name weights that both have, in the same shape: tied_weight_attr=['embed.weight']",
            )
        parameter_table(layer.get_submodule(holder))[own_name] = source


def _shapes_of(module: nn.Module) -> str:
    """Names and shapes of a module's parameters, for an error."""
    shapes = [f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters()]
    return ", ".join(shapes) or "no parameters"


def trim() -> None:
    """Gives memory that was freed back to the system. glibc keeps aligned blocks below 32 MB, and does not use them again."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)


def give_up(layers: Iterable[nn.Module], kept_layers: Iterable[nn.Module]) -> None:
    """Puts tensors of names and shapes alone in the place of those of `layers`, except what `kept_layers` share with them."""
    kept_ids: set[int] = set()
    for layer in kept_layers:
        kept_ids.update(map(id, layer.parameters()))
        kept_ids.update(map(id, layer.buffers()))
    # By the id of the old tensor, which is kept beside the new one: an id is used again once its tensor is gone.
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        for module in layer.modules():
            for table in (parameter_table(module), buffer_table(module)):
                for name, tensor in table.items():
                    if tensor is None or tensor.is_meta or id(tensor) in kept_ids:
                        continue
                    # A tied weight, which stands in several tables, stays one tensor.
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = (tensor, _without_values(tensor))
                    table[name] = replaced[id(tensor)][1]


def _without_values(tensor: Tensor) -> Tensor:
    """Makes a tensor on meta with the class and the attributes of a tensor."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # such as the mark of a weight that is tied
    return parameter
