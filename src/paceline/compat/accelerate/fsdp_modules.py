"""accelerate's functions about the modules of a model that FSDP divides, and its `fsdp2_*`, on a plan of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import CompatError
from paceline.compat.accelerate.module_classes import get_module_class_from_name
from paceline.compat.accelerate.module_tensors import find_tied_parameters
from paceline.world.forward import override_forward

if TYPE_CHECKING:
    from paceline.compat.accelerate.accelerator import Accelerator
    from paceline.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

# What torch adds to names of parameters: `torch.compile`, and a wrapper of activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Parameters of some modules of a model, which are moved to a device.

    Args:
        modules: the modules, a regular expression that whole names of modules match, or None for none.
        model: where a regular expression is looked for.
        device: where the modules go.
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


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """A function that gives a module its values, after which tied weights are one tensor again.

    Args:
        param_init_fn: gives the parameters of one module their values, such as `module.to_empty(device=...)`.
        model: whose tied weights are kept; it is looked at now, before any value is given.
        device: where the values go; `param_init_fn` knows it.
    """
    tied_names = [set(names) for names in find_tied_parameters(model)]
    if not tied_names:
        return param_init_fn
    group_of: dict[int, int] = {}
    for group, names in enumerate(tied_names):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in names:
                group_of[id(parameter)] = group
    kept_parameters: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> None:
        groups = {}
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in group_of:
                groups[name] = group_of[id(parameter)]
        param_init_fn(module)
        for name, group in groups.items():
            # The first module of a group keeps its new parameter, and the others take it.
            parameter = kept_parameters.setdefault(group, module.get_parameter(name))
            setattr(module, name, parameter)

    return initialise


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the names that the model's author gave them."""
    canonical = {}
    for name, value in named_params.items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        canonical[name] = value
    return canonical


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """The model as the accelerator's plan divides it. Ranks: all."""
    return accelerator.prepare_model(model)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Loads a whole state into a prepared model.

    Args:
        full_sd: the state; rank 0's counts, and the others may give an empty one.
        cpu_offload: without effect: the plan says where parameters live.

    Ranks: all.
    """
    state = accelerator.collectives.broadcast_object(dict(full_sd))
    with accelerator.full_parameters(model, writeback=True):
        accelerator.unwrap_model(model).load_state_dict(state)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in the place of those that an optimizer steps.

    Args:
        mapping: `data_ptr` of a parameter now -> the other one.

    Raises:
        KeyError: where one of them is not in `mapping`; nothing is changed then.
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
    """Whether a module is a unit of its own, as the plugin's `auto_wrap_policy` says; None where it has none.

    Raises:
        CompatError: `compat-argument`, where a class that the plugin names is not in the model.
    """
    # One of torch's functions, or accelerate's word for it.
    policy = getattr(fsdp2_plugin.auto_wrap_policy, "__name__", str(fsdp2_plugin.auto_wrap_policy)).lower()
    if "transformer" in policy:
        unit_classes = _unit_classes(fsdp2_plugin, model)
        return lambda module: isinstance(module, unit_classes)
    if "size" in policy:
        min_num_params = int(fsdp2_plugin.min_num_params or 0)
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) > min_num_params
    return None


def _unit_classes(fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes that the plugin names, else those that a model of transformers says stay whole.

    Raises:
        CompatError: `compat-argument`, where one of them is not in the model.
    """
    names = fsdp2_plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or []
    if isinstance(names, str):
        names = names.split(",")
    classes: list[type[nn.Module]] = []
    missing: list[str] = []
    for name in names:
        unit_class = get_module_class_from_name(model, name)
        if unit_class is None:
            missing.append(name)
        else:
            classes.append(unit_class)
    if missing:
        what = f"{type(model).__name__} holds no module of the class {', '.join(missing)}."
        why = "transformer_cls_names_to_wrap names it"
        raise CompatError("compat-argument", what, why=why, fix="name classes of the model's own blocks")
    return tuple(classes)


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """The model, whose units drop their activations after the forward pass and compute them again in the backward pass.

    Units are those of the plugin's `auto_wrap_policy`. Names of parameters stay as they are. The fields
    `activation_checkpointing` of the plugin and `recompute` of a plan do the same when a model is prepared.

    Raises:
        CompatError: `compat-argument`, as `fsdp2_prepare_auto_wrap_policy`.
    """
    is_unit = fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, model)
    if is_unit is None:
        return model
    units = [module for module in model.modules() if is_unit(module)]
    for unit in units:
        override_forward(unit, "recompute", _computed_again)
    return model


def _computed_again(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(original, *args, use_reentrant=False, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """torch's loss scaler, with keywords of its own."""
    return torch.amp.GradScaler(**kwargs)
