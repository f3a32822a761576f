"""Gradient clipping that does not care how parameters are laid out."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.world.collectives import Collectives
from paceline.world.sharded import gradient_holder, is_sharded, local, whole


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

    Gradients that are divided in different ways get one norm each, which are then combined: torch's own function
    refuses the mixture. So are the norms of ranks that hold different parameters.

    Args:
        max_norm: infinity measures, and scales nothing.
        across: those ranks, where there are any.

    Ranks: all that hold shards of the parameters, and those of `across`; each gets the same norm, a 0-dim tensor.
    """
    parameters = [parameter for parameter in _list(parameters) if parameter.grad is not None]
    # By mesh and placements of the gradient: that of a whole parameter may be divided all the same (`zero`, stage 2).
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        division = (parameter.grad.device_mesh, parameter.grad.placements) if is_sharded(parameter.grad) else None
        groups.setdefault(division, []).append(parameter)
    if set(groups) <= {None} and across is None:
        if max_norm == math.inf:
            return torch.nn.utils.get_total_norm(_gradients(parameters), norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norms: list[Tensor] = []
    for group in groups.values():
        if across is not None:
            group = [parameter for parameter in group if id(parameter) not in across.elsewhere]
        norms.append(_norm_of_alike(_gradients(group), norm_type))
    if across is not None:
        device = across.collectives.device
        here = torch.zeros(1, device=device)
        if norms:
            here = torch.stack([norm.to(device) for norm in norms])
        norms = list(across.collectives.gather(torch.linalg.vector_norm(here, norm_type).float()))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm != math.inf:
        # DTensor would search for how to divide one multiplication of all gradients, which takes most of the first call.
        torch.nn.utils.clip_grads_with_norm_(map(gradient_holder, parameters), max_norm, total)
    return total


def _norm_of_alike(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The norm of gradients that are all divided in the same way. Ranks: all that hold a part."""
    first = gradients[0] if gradients else None
    if not is_sharded(first):
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if any(placement.is_partial() for placement in first.placements):
        return whole(torch.nn.utils.get_total_norm(gradients, norm_type))  # type: ignore[no-any-return]
    # Of plain tensors, and gathered as one number a rank: DTensor would search for how to divide norms of all gradients.
    parts = [local(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type)
    placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in first.placements]
    norms = DTensor.from_local(norm.to(parts[0]).reshape(1), first.device_mesh, placements, run_check=False)
    total: Tensor = torch.linalg.vector_norm(whole(norms), norm_type)
    return total


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clip_grad_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamps each gradient element to [-clip_value, clip_value], in place; needs no communication under any layout."""
    with_gradients = [parameter for parameter in _list(parameters) if parameter.grad is not None]
    if with_gradients:
        torch.nn.utils.clip_grad_value_(with_gradients, clip_value)
