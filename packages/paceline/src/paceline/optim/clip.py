"""Gradient clipping for parameters of any layout: plain tensors, and DTensors on different meshes.

`Accelerator.clip_grad_norm_` and `clip_grad_value_` call it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from paceline.base.errors import TrainError
from paceline.world.collectives import Collectives
from paceline.world.sharded import any_sharded, gradient_holder, is_sharded, local, whole

# torch adds this to the norm before it divides by it.
_TORCH_EPSILON = 1e-6


@dataclass(frozen=True)
class Across:
    """The ranks that hold different parameters of the same models: the stages of a pipeline.

    Attributes:
        collectives: of these ranks.
        elsewhere: the `id` of each parameter of this rank whose gradient is counted by another of them.
    """

    collectives: Collectives
    elsewhere: Container[int]


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    across: Across | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place such that their total norm is at most `max_norm`.

    Gradients that are sharded in different ways are measured separately, and the norms are combined; torch's own function
    refuses such a mixture. Norms of ranks that hold different parameters are combined in the same way.

    Args:
        parameters: parameters with gradients.
        max_norm: the largest norm; infinity measures the norm and scales nothing.
        norm_type: the order of the norm.
        across: the ranks that hold different parameters, or None.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error.

    Returns:
        The norm before scaling, the same on every rank. Shape: [].

    Ranks: all that hold shards of the parameters, and all of `across`.

    Raises:
        TrainError: `clip-norm-type`; `clip-nonfinite`, on all ranks and before anything is scaled.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = _gradients(parameters)
    is_divided = across is not None or any_sharded(gradients)
    if norm_type == 0 and is_divided:
        raise TrainError(
            "clip-norm-type",
            "gradients that are divided over ranks have no norm of order 0.",
            why="norm_type=0: torch counts the gradients that are not zero, and each rank has only parts of them",
            fix="use norm_type=2, or norm_type=float('inf') for the largest element",
        )
    if is_divided:
        total = _norm_of_all(parameters, norm_type, across)
    else:
        total = torch.nn.utils.get_total_norm(gradients, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise TrainError(
            "clip-nonfinite",
            f"the norm of the gradients is {total.item()}, so they cannot be clipped.",
            why=f"error_if_nonfinite=True; {_nonfinite(parameters)}",
            fix="look for the first operation that gives NaN with `torch.autograd.set_detect_anomaly(True)`; or leave "
            "`error_if_nonfinite` out",
        )
    # On the CPU it costs nothing to look at the norm. An accelerator would have to finish its work first.
    exceeds = max_norm != math.inf and not (total.device.type == "cpu" and total + _TORCH_EPSILON <= max_norm)
    if exceeds:
        # Local tensors are scaled. DTensor would first search for the sharding of one multiplication of all gradients, which
        # takes most of the time of the first call.
        holders = map(gradient_holder, parameters) if is_divided else parameters
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total)
    return total


def _nonfinite(parameters: Iterable[Tensor]) -> str:
    """Says how many gradients are not finite, as far as this rank knows."""
    gradients = [local(gradient) for gradient in _gradients(parameters)]
    count = sum(not bool(gradient.isfinite().all()) for gradient in gradients)
    return f"{count} of {len(gradients)} gradients have elements on this rank that are NaN or infinite"


def _norm_of_all(parameters: Iterable[Tensor], norm_type: float, across: Across | None) -> Tensor:
    """Combines the norms of gradients, some of which are sharded. Ranks: all. Shape: []."""
    # Parameters are grouped by the mesh and the placements of the gradient, and not of the parameter: at ZeRO stage 2 an
    # unsharded parameter has a sharded gradient. The key of unsharded gradients is None.
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        sharding = None
        if is_sharded(parameter.grad):
            sharding = (parameter.grad.device_mesh, parameter.grad.placements)
        groups.setdefault(sharding, []).append(parameter)
    norms: list[Tensor] = []
    for group in groups.values():
        # A parameter that two stages hold has the same gradient on both; the stage on the lower rank counts it.
        counted = group
        if across is not None:
            counted = [parameter for parameter in group if id(parameter) not in across.elsewhere]
        norms.append(_norm_of_one_sharding(_gradients(counted), norm_type))
    if across is not None:
        device = across.collectives.device
        # A rank without gradients takes part too, with a norm of 0.
        own_norms = torch.zeros(1, device=device)
        if norms:
            own_norms = torch.stack([norm.to(device) for norm in norms])
        own_norm = torch.linalg.vector_norm(own_norms, norm_type)
        # The result has one dtype on all ranks: float64 if some gradient has it, and otherwise float32.
        is_double = float(own_norm.dtype == torch.float64)
        gathered = across.collectives.gather(torch.stack([own_norm.double(), own_norm.new_tensor(is_double).double()]))
        dtype = torch.float64 if gathered[1::2].any() else torch.float32
        norms = list(gathered[::2].to(dtype))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _norm_of_one_sharding(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of gradients that are all sharded in the same way. Ranks: all that hold shards. Shape: []."""
    first = None
    if gradients:
        first = gradients[0]  # all have the mesh and the placements of this one
    if not is_sharded(first):
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # A partial gradient is a sum over ranks. Its norm does not follow from the norms of the summands.
    if any(placement.is_partial() for placement in first.placements):
        return whole(torch.nn.utils.get_total_norm(gradients, norm_type))  # type: ignore[no-any-return]
    # Each rank computes the norm of its local tensors, and these norms are gathered, one number from each rank. DTensor's own
    # norm of many gradients would first search for their sharding.
    local_gradients = [local(gradient) for gradient in gradients]
    # Without elements there is no norm of order infinity, and a rank may have no rows of a small gradient.
    with_elements = [tensor for tensor in local_gradients if tensor.numel()]
    own_norm = torch.nn.utils.get_total_norm(with_elements, norm_type)
    # The norms form one DTensor that is sharded where the gradients are, so that each norm counts once: the ranks of a
    # replicated mesh dimension have the same one.
    placements: list[Replicate | Shard] = []
    for placement in first.placements:
        placements.append(Replicate() if placement.is_replicate() else Shard(0))
    # Each rank sends its norm in the dtype to which torch promotes those of all gradients, as it does for whole gradients. It
    # must not be the dtype of some gradient: a norm of float32 gradients may be infinite in float16. Nor that of the computed
    # norm, which is float32 on a rank without elements.
    dtype = reduce(torch.promote_types, [gradient.dtype for gradient in local_gradients])
    # [1] on each rank; as a DTensor [ranks along the sharded dimensions].
    own_norm = own_norm.to(local_gradients[0].device, dtype).reshape(1)
    norms = DTensor.from_local(own_norm, first.device_mesh, placements, run_check=False)
    total: Tensor = torch.linalg.vector_norm(whole(norms), norm_type)
    return total


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamps gradients in place to [-clip_value, clip_value]. It does not communicate under any layout."""
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    if with_gradients:
        torch.nn.utils.clip_grad_value_(with_gradients, clip_value)
