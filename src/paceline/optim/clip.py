"""Gradient clipping that does not care how parameters are laid out."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.world.sharded import is_sharded, quietly, whole


@dataclass(frozen=True)
class Across:
    """Ranks that hold other parameters of the same models: the stages of a pipeline.

    Attributes:
        collectives: of these ranks.
        elsewhere: the `id` of each parameter here whose gradient another of them counts.
    """

    collectives: Any
    elsewhere: Container[int]


def _list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Across | None = None,
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, in place.

    Gradients that live on different meshes get one norm a mesh, which are then combined: torch's own function
    refuses the mixture. So are the norms of ranks that hold different parameters.

    Args:
        max_norm: infinity measures, and scales nothing.
        across: those ranks, where there are any.

    Ranks: all that hold shards of the parameters, and those of `across`; each gets the same norm, a 0-dim tensor.
    """
    found = [p for p in _list(parameters) if p.grad is not None]
    meshes: dict[object, list[torch.Tensor]] = {}
    for parameter in found:
        # The gradient's mesh: that of a whole parameter may be divided all the same (`zero`, stage 2).
        meshes.setdefault(parameter.grad.device_mesh if is_sharded(parameter.grad) else None, []).append(parameter)
    if set(meshes) <= {None} and across is None:
        if max_norm == math.inf:
            return torch.nn.utils.get_total_norm([p.grad for p in found if p.grad is not None], norm_type)
        return torch.nn.utils.clip_grad_norm_(found, max_norm, norm_type)
    norms = []
    for group in meshes.values():
        counted = [p.grad for p in group if p.grad is not None and not (across and id(p) in across.elsewhere)]
        with quietly():
            norms.append(whole(torch.nn.utils.get_total_norm(counted, norm_type)))
    if across is not None:
        device = across.collectives.device
        here = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1, device=device)
        norms = list(across.collectives.gather(torch.linalg.vector_norm(here, norm_type).float()))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in meshes.values() if max_norm != math.inf else ():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamps each gradient element to [-clip_value, clip_value], in place; needs no communication under any layout."""
    found = [p for p in _list(parameters) if p.grad is not None]
    if found:
        torch.nn.utils.clip_grad_value_(found, clip_value)
