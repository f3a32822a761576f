"""accelerate's functions about the modules of a model that FSDP divides, among them `fsdp2_*`, for scripts that call them.

Here a plan divides the model, so these functions call Paceline's accelerator or change nothing but the model they get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.world.forward import override_forward
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.module_classes import classes_of_units
from paceline_accelerate.module_tensors import find_tied_parameters
from paceline_accelerate.surroundings import is_peft_model

if TYPE_CHECKING:
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

# What torch adds to names of parameters: `torch.compile`, and a wrapper of activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Moves some modules of a model to a device, and returns their parameters.

    Args:
        modules: the modules, a regular expression for their full names, or None for none.
        model: the model whose modules a regular expression is compared with.
        device: the device.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        chosen = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    else:
        chosen = list(modules)
    parameters: set[nn.Parameter] = set()
    for module in chosen:
        parameters.update(module.to(device).parameters())
    return parameters


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    """Returns the state of a model; libraries import it by this name.

    Args:
        model: whole, or divided by FSDP 2.
        adapter_only: whether only peft's adapter is wanted, where the model has one.
        sd_options: torch's `StateDictOptions`; None takes `model.state_dict()`.

    Ranks: all, where the model is divided.
    """
    is_adapter = adapter_only and is_peft_model(model)
    if sd_options is not None and (sd_options.full_state_dict or not is_adapter):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        # The weights below an adapter are frozen.
        return get_model_state_dict(
            model, options=replace(sd_options, ignore_frozen_params=True) if is_adapter else sd_options
        )
    if is_adapter:
        from peft import get_peft_model_state_dict

        adapter: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=cast(Any, model).active_adapter)
        return adapter
    return model.state_dict()


def _set_model_state_dict(
    model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Loads what `_get_model_state_dict` has returned, and returns the names that did not match.

    Ranks: all, where the model is divided.
    """
    is_adapter = adapter_only and is_peft_model(model)
    if sd_options is not None and (sd_options.full_state_dict or not is_adapter):
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        options = replace(sd_options, strict=False) if is_adapter else sd_options
        return set_model_state_dict(model, state_dict, options=options)
    if is_adapter:
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(model, state_dict, adapter_name=cast(Any, model).active_adapter)
    return model.load_state_dict(state_dict)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Returns the names of the first and of the last linear layer, which 8-bit training leaves as they are."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Whether a layer can be computed in 8 bits: its sizes are multiples of 16, and it is none of `layers_to_filter`."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether a layer can be computed in 8 bits, and is neither the first nor the last linear layer inside `module`."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Checks that no layer of a model of transformers carries a state along the sequence, which `sp` divides.

    Raises:
        CompatValueError: `compat-argument`.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if "linear_attention" in kind)
    if recurrent:
        raise CompatValueError(
            "compat-argument",
            f"{type(model).__name__} has layers of type {recurrent}, which sequence parallelism does not support.",
            why="each rank would begin its part of the sequence without the state of the part before",
            fix="divide the model by another axis: `ParallelismConfig(dp_shard_size=...)` in place of `sp_size`",
        )


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """Returns a function that initialises a module as `param_init_fn` does, and ties its weights again.

    Args:
        param_init_fn: initialises the parameters of one module, such as by `module.to_empty(device=...)`.
        model: the model whose tied weights are kept. They are found now, because later they are different tensors.
        device: has no effect; `param_init_fn` knows the device.
    """
    tied_names = [set(names) for names in find_tied_parameters(model)]
    if not tied_names:
        return param_init_fn
    group_of: dict[int, int] = {}
    for group, names in enumerate(tied_names):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in names:
                group_of[id(parameter)] = group
    new_parameters: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> None:
        groups = {}
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in group_of:
                groups[name] = group_of[id(parameter)]
        param_init_fn(module)
        for name, group in groups.items():
            # The first module of a group keeps its new parameter, and the others take it.
            parameter = new_parameters.setdefault(group, module.get_parameter(name))
            setattr(module, name, parameter)

    return initialise


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same values under names without the parts that torch's wrappers added."""
    canonical = {}
    for name, value in named_params.items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        canonical[name] = value
    return canonical


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Prepares a model, which the accelerator's plan divides. Ranks: all."""
    return accelerator.prepare_model(model)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Loads a whole state into a prepared model.

    Args:
        full_sd: the whole state on rank 0; the other ranks may pass an empty one.
        cpu_offload: has no effect: the plan says on which device parameters are.

    Ranks: all.
    """
    state = accelerator.collectives.broadcast_object(dict(full_sd))
    with accelerator.full_parameters(model, writeback=True):
        accelerator.unwrap_model(model).load_state_dict(state)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[int, nn.Parameter]) -> None:
    """Replaces the parameters that an optimizer steps.

    Args:
        mapping: `data_ptr` of a present parameter -> the new one.

    Raises:
        KeyError: a present parameter is not in `mapping`; nothing is changed then.
    """
    # All are looked up before the first group changes.
    parameters_by_group: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        parameters_by_group.append([mapping[parameter.data_ptr()] for parameter in group["params"]])
    for group, parameters in zip(optimizer.param_groups, parameters_by_group, strict=True):
        group["params"] = parameters


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Returns a function that says whether a module is a unit by the plugin's `auto_wrap_policy`; None if it has none.

    Raises:
        CompatValueError: `compat-argument`, if the model has no module of a class that the plugin names.
    """
    # The policy is one of torch's functions, or accelerate's word for it.
    policy = getattr(fsdp2_plugin.auto_wrap_policy, "__name__", str(fsdp2_plugin.auto_wrap_policy)).lower()
    if "transformer" in policy:
        unit_classes = classes_of_units(fsdp2_plugin.transformer_cls_names_to_wrap, model)
        return lambda module: isinstance(module, unit_classes)
    if "size" in policy:
        min_num_params = int(fsdp2_plugin.min_num_params or 0)
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) > min_num_params
    return None


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Applies activation checkpointing to the units of a model, in place, and returns the model.

    Units are those of the plugin's `auto_wrap_policy`. Names of parameters do not change. `prepare` does the same if
    `activation_checkpointing` of the plugin or `recompute` of a plan is set.

    Raises:
        CompatValueError: `compat-argument`, as `fsdp2_prepare_auto_wrap_policy`.
    """
    is_unit = fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, model)
    if is_unit is None:
        return model
    units = [module for module in model.modules() if is_unit(module)]
    for unit in units:
        override_forward(unit, "recompute", _checkpointed_forward)
    return model


def _checkpointed_forward(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(original, *args, use_reentrant=False, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Returns torch's loss scaler; `kwargs` are its keywords."""
    return torch.amp.GradScaler(**kwargs)
