"""The private side of `nn.Module`: the tables in which a module keeps what was assigned to its attributes.

Each gives the table itself. What is written there takes the place of a tensor or a module without `__setattr__`, which would
refuse a plain tensor for a parameter, and of which classes may have one of their own (`nn.RNNBase`). The public
`named_parameters(recurse=False)` and `named_children` leave out what is None or shared.
"""

from __future__ import annotations

from typing import cast

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


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called on this very module."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or one inside of it runs through `torch.compile`, or was compiled in place by `module.compile()`."""
    parts = module.modules()
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts)
