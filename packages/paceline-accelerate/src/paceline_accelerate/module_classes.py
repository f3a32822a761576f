"""Small functions of accelerate about classes of modules and models; scripts call them, and `fsdp_modules` the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Returns the class of this name among those of a module and all modules within it; None if there is none."""
    for submodule in module.modules():
        if type(submodule).__name__ == name:
            return type(submodule)
    return None


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Any], Any]:
    """Returns a decorator that changes nothing: Paceline has no Megatron-LM whose arguments a function could extend."""

    def decorate(function: Any) -> Any:
        return function

    return decorate
