"""`accelerate.utils.other` on modules: what wraps a model, repeated blocks compiled one by one, states for safetensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paceline.precision.policy import unwrap_forward
from paceline.torch_internals.modules import compiled_original
from paceline_accelerate.torch_internals.kept import with_compiled_original

_WRAPPERS = (DataParallel, DistributedDataParallel)


# -- wrappers ------------------------------------------------------------------------------------------------


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` has wrapped it."""
    return compiled_original(module) is not None


def has_compiled_regions(module: Any) -> bool:
    """Whether `torch.compile` has wrapped a module, or a module inside it."""
    return isinstance(module, nn.Module) and any(is_compiled_module(inner) for inner in module.modules())


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Returns the module inside of DataParallel, DistributedDataParallel and `torch.compile`.

    Args:
        model: the wrapped module.
        keep_fp32_wrapper: whether the mixed-precision forward is kept.
        keep_torch_compile: whether a compiled module is returned if one was given.
        recursive: whether every module with a module as its attribute `module` is replaced by that one, also inside.
    """
    # A module of `compile_regions` is no wrapper and keeps the plain module in its dictionary.
    original = compiled_original(model) or vars(model).get("_orig_mod")
    inner = model if original is None else original
    while isinstance(inner, _WRAPPERS) or _is_engine(inner):
        inner = inner.module
    if recursive:
        inner = _without_wrappers(inner)
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
    if original is None or not keep_torch_compile:
        return inner
    if inner is original:
        return model
    # The module that was given keeps its wrapper, which averages gradients, so a copy of it is changed.
    return with_compiled_original(model, inner)


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Returns the module inside of all wrappers, of any class, and unwraps its children in place."""
    inner = getattr(module, "module", None)
    if isinstance(inner, nn.Module):
        return _without_wrappers(inner)
    for name, child in module.named_children():
        setattr(module, name, _without_wrappers(child))
    return module


def _is_engine(model: Any) -> bool:
    """Whether a model is a DeepSpeed engine, which has the script's module inside, like DDP."""
    engines = sys.modules.get("paceline_deepspeed.engine")  # loaded, if there is an engine
    return engines is not None and isinstance(model, engines.DeepSpeedEngine)


# -- repeated blocks -----------------------------------------------------------------------------------------


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one class."""
    if not isinstance(module, nn.ModuleList):
        return False
    classes = {type(block) for block in module}
    return len(classes) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module, or a module inside it, is a list of repeated blocks."""
    return any(is_repeated_blocks(inner) for inner in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Returns a copy that shares the parameters and whose repeated blocks are compiled one by one.

    Blocks of one class share the compiled code, so compilation is shorter. The copy's `_orig_mod` is the original. A module
    without repeated blocks is compiled as a whole.
    """
    if not has_repeated_blocks(module):
        return cast(nn.Module, torch.compile(module, **compile_kwargs))
    regions = copy.copy(module)
    vars(regions)["_modules"] = {}  # `copy.copy` shares this dictionary with the original
    # A method that was set on the module, such as a patched `forward`, would run the original with its plain blocks.
    for name, value in vars(regions).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(regions)[name] = MethodType(value.__func__, regions)
    holds_blocks = is_repeated_blocks(module)
    for name, child in module.named_children():
        if holds_blocks:
            compiled = cast(nn.Module, torch.compile(child, **compile_kwargs))
        else:
            compiled = compile_regions(child, **compile_kwargs)
        regions.add_module(name, compiled)
    regions.__dict__["_orig_mod"] = module  # as a submodule its parameters would count twice
    return regions


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compiles the repeated blocks of a module in place: no module is put around a block."""
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return
    holds_blocks = is_repeated_blocks(module)
    for child in module.children():
        if holds_blocks:
            child.compile(**compile_kwargs)
        else:
            compile_regions_deepspeed(child, **compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compiles the repeated blocks of a module in place, and returns the module."""
    compile_regions_deepspeed(module, **compile_kwargs)
    return module


# -- other questions -----------------------------------------------------------------------------------------


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Lists all modules, each after those inside it and the model last; with `return_fqns` as pairs of name and module."""
    ordered: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        for child_name, child in module.named_children():
            visit(prefix + child_name, child)
        ordered.append((name, module))

    visit("", model)
    if return_fqns:
        return ordered
    return [module for _, module in ordered]


def get_model_tp_size(model: nn.Module) -> int | None:
    """Returns the number of ranks over which transformers divided a model when it loaded it; None for other models."""
    size: int | None = getattr(model, "tp_size", None)
    if size is not None:
        return size
    # Since transformers 5 the model's config has it, as an object, or as the dictionary of a saved config.
    distributed: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    if isinstance(distributed, Mapping):
        return distributed.get("tp_size")
    return getattr(distributed, "tp_size", None)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state that safetensors can save: contiguous tensors, and of those that share memory only the first."""
    from paceline_accelerate.rank_logger import get_logger

    tensors = {name: tensor for name, tensor in state_dict.items() if not isinstance(tensor, str)}
    untied = without_repeated(tensors)
    removed = [name for name in tensors if name not in untied]
    if removed:
        get_logger(__name__).warning_once(
            f"{', '.join(removed)} share memory with tensors of other names, and are saved once. Loading warns where it "
            "misses them."
        )
    return {name: tensor.contiguous() for name, tensor in untied.items()}


def without_repeated(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps tied weights under their first name only, because accelerate refuses a safetensors file that repeats them."""
    first_names: dict[Any, str] = {}
    for name, tensor in state.items():
        # Two tensors are the same if they see the same part of one memory. Different parts of it are saved separately.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        first_names.setdefault(place, name)
    return {name: state[name] for name in first_names.values()}
