"""Gradient clipping that does not care how parameters are laid out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.world.sharded import is_sharded, whole


def _list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, in place.

    Parameters that live on different meshes get one norm a mesh, which are then combined: torch's own function
    refuses the mixture.

    Ranks: all that hold shards of the parameters; each gets the same norm, a 0-dim tensor.
    """
    found = [p for p in _list(parameters) if p.grad is not None]
    meshes: dict[object, list[torch.Tensor]] = {}
    for parameter in found:
        meshes.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    if set(meshes) <= {None}:
        return torch.nn.utils.clip_grad_norm_(found, max_norm, norm_type)
    norms = []
    for group in meshes.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], norm_type)
        norms.append(whole(norm))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamps each gradient element to [-clip_value, clip_value], in place; needs no communication under any layout."""
    found = [p for p in _list(parameters) if p.grad is not None]
    if found:
        torch.nn.utils.clip_grad_value_(found, clip_value)
