"""The private side of `nn.Module`: compilation, loading, and the tables that hold what was assigned to its attributes.

A function that ends with `_table` gives the table itself. What is written there takes the place of a tensor or a module
without `__setattr__`, which would refuse a plain tensor for a parameter, and of which classes may have one of their own
(`nn.RNNBase`). The public `named_parameters(recurse=False)` and `named_children` leave out what is None or shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn


def parameter_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters of a module itself, by their names in it."""
    return cast("dict[str, Tensor | None]", module._parameters)


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by their names in it."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules directly in a module, by their names in it."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers of a module itself that its state dict leaves out; `register_buffer` alone is told of it."""
    return set(module._non_persistent_buffers_set)


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of a module and of those in it, as `Module.to` does."""
    module._apply(change)


def loading_functions(module: nn.Module) -> list[Callable[..., Any]]:
    """The functions that load a module itself in `load_state_dict`: its methods and its hooks."""
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return [module.load_state_dict, module._load_from_state_dict, *hooks]


def inside_compiled(module: object) -> nn.Module | None:
    """The module that `torch.compile` was given, if this is what it returned; else None."""
    return getattr(module, "_modules", {}).get("_orig_mod")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called on this very module."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or one inside of it runs through `torch.compile`, or was compiled in place by `module.compile()`."""
    parts = module.modules()
    return any(inside_compiled(part) is not None or is_compiled_in_place(part) for part in parts)
