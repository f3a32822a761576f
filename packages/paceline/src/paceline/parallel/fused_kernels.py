"""Turns an optimizer's `fused` off where torch's fused kernels cannot take its tensors, or would take them in a wrong way.

Nothing turns it on: a script that is prepared steps with the kernels of the plain script, whose rounding it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.world.sharded import any_sharded, local


def suit_fused(adapter: OptimizerAdapter) -> None:
    """Turns `fused` off before a step that torch's fused kernels cannot take, or would take in a wrong way."""
    # Only torch's optimizers have the option. A checkpoint that is loaded later may turn it on.
    if any("fused" in group for group in adapter.optimizer.param_groups):
        adapter.choose_kernels(_plain_where_unsuited)


def _plain_where_unsuited(optimizer: Optimizer) -> None:
    """Turns `fused` off for groups that torch's fused kernels cannot take."""
    for group in optimizer.param_groups:
        if group.get("fused") and (_is_strided(group) or _one_begins_late(optimizer, group)):
            group["fused"] = False


def _is_strided(group: Mapping[str, Any]) -> bool:
    """Returns whether parameters and gradients of a group on the CPU are not all contiguous.

    torch's fused kernels for the CPU run through the memory of parameter, gradient and states as if all had one layout without
    gaps. Where that is not so, they change other elements without an error (torch 2.13). The rows that a rank steps of a
    transposed parameter have gaps, and a gradient that is reduced or assigned by a script may have another layout than its
    parameter. On accelerators torch raises an error itself.
    """
    # Asked of all tensors in each step. So nothing is computed, and the device, which differs seldom, is asked last.
    tensors: list[Tensor] = []
    for parameter in group["params"]:
        if parameter.grad is not None:
            tensors += (parameter, parameter.grad)
    if any_sharded(tensors):
        tensors = [local(tensor) for tensor in tensors]
    return not all(tensor.is_contiguous() or tensor.device.type != "cpu" for tensor in tensors)


def _one_begins_late(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Returns whether only some parameters of a group of SGD have a momentum buffer.

    That happens if a parameter gets its first gradient in a later step. torch's fused SGD refuses it.
    """
    if not group.get("momentum"):
        return False
    lacks_buffer: set[bool] = set()
    for parameter in group["params"]:
        if parameter.grad is not None:
            state = optimizer.state.get(parameter, {})
            lacks_buffer.add(state.get("momentum_buffer") is None)
    return len(lacks_buffer) > 1
