"""Gradient clipping that does not care how parameters are laid out."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.world.collectives import Collectives
from paceline.world.sharded import is_sharded, quietly, whole


@dataclass(frozen=True)
class Across:
    """Ranks that hold other parameters of the same models: the stages of a pipeline.

    Attributes:
        collectives: of these ranks.
        elsewhere: the `id` of each parameter here whose gradient another of them counts.
    """

    collectives: Collectives
    elsewhere: Container[int]


def _list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Across | None = None,
) -> Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, in place.

    Gradients that live on different meshes get one norm a mesh, which are then combined: torch's own function
    refuses the mixture. So are the norms of ranks that hold different parameters.

    Args:
        max_norm: infinity measures, and scales nothing.
        across: those ranks, where there are any.

    Ranks: all that hold shards of the parameters, and those of `across`; each gets the same norm, a 0-dim tensor.
    """
    parameters = [parameter for parameter in _list(parameters) if parameter.grad is not None]
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        # The gradient's mesh: that of a whole parameter may be divided all the same (`zero`, stage 2).
        mesh = parameter.grad.device_mesh if is_sharded(parameter.grad) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    if set(by_mesh) <= {None} and across is None:
        if max_norm == math.inf:
            return torch.nn.utils.get_total_norm(_gradients(parameters), norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norms: list[Tensor] = []
    for group in by_mesh.values():
        if across is not None:
            group = [parameter for parameter in group if id(parameter) not in across.elsewhere]
        with quietly():
            norms.append(whole(torch.nn.utils.get_total_norm(_gradients(group), norm_type)))
    if across is not None:
        device = across.collectives.device
        here = torch.zeros(1, device=device)
        if norms:
            here = torch.stack([norm.to(device) for norm in norms])
        norms = list(across.collectives.gather(torch.linalg.vector_norm(here, norm_type).float()))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm != math.inf:
        for group in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clip_grad_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamps each gradient element to [-clip_value, clip_value], in place; needs no communication under any layout."""
    with_gradients = [parameter for parameter in _list(parameters) if parameter.grad is not None]
    if with_gradients:
        torch.nn.utils.clip_grad_value_(with_gradients, clip_value)
