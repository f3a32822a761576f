"""Small functions of accelerate about classes of modules and models; scripts call the first and the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from paceline_accelerate.errors import CompatValueError


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Returns the class of this name among those of a module and all modules within it; None if there is none."""
    for submodule in module.modules():
        if type(submodule).__name__ == name:
            return type(submodule)
    return None


def classes_of_units(names: str | Sequence[str] | None, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Returns the classes of these names (of a plugin), else those that a model of transformers lists as its blocks.

    Raises:
        CompatValueError: `compat-argument`, if the model has no module of one of them.
    """
    names = names or getattr(model, "_no_split_modules", None) or []
    if isinstance(names, str):
        names = names.split(",")
    classes = {name: get_module_class_from_name(model, name) for name in names}
    missing = [name for name, found in classes.items() if found is None]
    if missing:
        what = f"{type(model).__name__} holds no module of the class {', '.join(missing)}."
        why = "transformer_cls_names_to_wrap names it"
        raise CompatValueError("compat-argument", what, why=why, fix="name classes of the model's own blocks")
    return tuple(found for found in classes.values() if found is not None)


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Any], Any]:
    """Returns a decorator that changes nothing: Paceline has no Megatron-LM whose arguments a function could extend."""

    def decorate(function: Any) -> Any:
        return function

    return decorate
