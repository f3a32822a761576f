"""The private side of `nn.Module`: its tables, what loads a state dict into it, and what `torch.compile` makes of it.

The functions named `..._table` give the table itself in which a module keeps what was assigned to its attributes. What is
written there takes the place of a tensor or a module without `__setattr__`, which would refuse a plain tensor for a parameter,
and of which classes may have one of their own (`nn.RNNBase`). The public `named_parameters(recurse=False)` and
`named_children` leave out what is None or shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

BatchNormBase = _BatchNorm  # the class of all batch norms, of any number of dims
InstanceNormBase = _InstanceNorm
ORIGINAL = "_orig_mod"  # the child of a module that `torch.compile` has made


def parameter_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters of a module itself, by their names in it."""
    return cast("dict[str, Tensor | None]", module._parameters)


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by their names in it."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules directly in a module, by their names in it."""
    return module._modules


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of a module and of those in it, as `Module.to` does."""
    module._apply(change)


def loading_functions(module: nn.Module) -> list[Callable[..., Any]]:
    """What loads a state dict into a module itself: the method that a class may override, and hooks of both kinds."""
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return [module._load_from_state_dict, *hooks]


def compiled_original(module: object) -> nn.Module | None:
    """Returns the module that `torch.compile` has wrapped; None of anything that is no such wrapper."""
    return module._modules.get(ORIGINAL) if isinstance(module, nn.Module) else None


def computes_weight(module: nn.Module) -> bool:
    """Whether a module computes a weight from its own parameters: a list of parametrizations, or one of the older functions.

    `torch.nn.utils.weight_norm` leaves the parameters `weight_g` and `weight_v`; `torch.nn.utils.spectral_norm` leaves
    `weight_orig`, and the buffer `weight_u`.
    """
    if isinstance(module, ParametrizationList):
        return True
    for name in module._parameters:
        normed, _, ending = name.rpartition("_")
        if ending == "g" and f"{normed}_v" in module._parameters:
            return True
        if ending == "orig" and f"{normed}_u" in module._buffers:
            return True
    return False


def iterates(module: nn.Module) -> bool:
    """Whether each forward pass in training makes a step towards a spectral norm in this module.

    That is so in torch's parametrization of that name, and in a layer that the older function has changed.
    """
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called on this very module."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or one inside of it runs through `torch.compile`, or was compiled in place by `module.compile()`."""
    return any(compiled_original(part) is not None or is_compiled_in_place(part) for part in module.modules())


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Returns the same leaf tensor, which modules take for a parameter from here on. Others may hold it."""
    if not isinstance(tensor, nn.Parameter):
        tensor._is_param = True
    assert isinstance(tensor, nn.Parameter)
    return tensor
