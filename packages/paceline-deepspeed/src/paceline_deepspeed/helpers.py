"""Small functions of DeepSpeed's that scripts call by themselves: copies of tensors, and questions about parameters."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.world.tree import map_leaves, map_tensors


class ZeroStageEnum(IntEnum):
    """What a stage of ZeRO divides."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns a nested structure with copies of its tensors, so that a file of a view has the values of the view alone."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True), item)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Returns a nested structure with its leaves on a device; one for which `criterion_func` is true is moved in place."""

    def moved(leaf: Any) -> Any:
        if criterion_func is None or not criterion_func(leaf):
            return leaf.to(device)
        leaf.data = leaf.data.to(device)
        return leaf

    return map_leaves(moved, item)


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Returns inputs without their graphs; those that need gradients still do."""

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device or tensor.device).detach().requires_grad_(tensor.requires_grad)

    return tuple(detached(value) if isinstance(value, torch.Tensor) else value for value in inputs)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file, and those above it."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def is_zero_param(parameter: Any) -> bool:
    """Whether stage 3 divides a parameter."""
    return hasattr(parameter, "ds_id")


# -- norms -------------------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: object = None
) -> torch.Tensor:
    """Scales gradients so that their norm is `max_norm` at most, and returns the norm that they had.

    `mpu` is accepted and has no effect: a gradient that ranks divide is a DTensor, whose norm is that of all its parts.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def get_global_norm(norm_list: Sequence[float]) -> float:
    """Returns the norm of several groups of parameters together, of the norm of each."""
    return math.hypot(*norm_list)


# -- experts, which no model has here ----------------------------------------------------------------------------------


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is one of experts that are divided over ranks."""
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer has parameters of experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns whether a model has divided experts, and how many: none, since `MoE` cannot be made."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """Returns the groups as they are: there are no experts to be taken out of them."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
