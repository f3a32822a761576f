"""Small functions of accelerate about classes of modules and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of this name among those of a module and all modules within it; None where there is none."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Any], Any]:
    """A decorator that leaves a function as it is: there is no Megatron-LM here whose arguments it could extend."""

    def decorate(function: Any) -> Any:
        return function

    return decorate
