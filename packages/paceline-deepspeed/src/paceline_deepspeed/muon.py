"""`MuonWithAdam`: the optimizer that a DeepSpeed config calls Muon. It steps matrices by Muon, and the rest by Adam.

DeepSpeed decides by names and shapes: embeddings, heads (`lm_head`) and parameters with fewer than two dimensions go to Adam.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, for the coefficients; Dao et al., "Gram
Newton-Schulz", 2026, for the iteration over the small square matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline_large.optim.muon import COEFFICIENTS, NUM_ITERATIONS, Muon, newton_schulz, shape_scale, step_along

NS_METHODS = ("gram", "standard")
_FOR_ADAM = ("embed", "lm_head")  # parts of names
_RESTART = 2  # the iteration at which the product is multiplied into the matrix: half precision stays stable
_EPS = 1e-7
# What each half takes from a config or a group, and DeepSpeed's defaults.
_MUON_DEFAULTS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def set_optimizer_flags(model: nn.Module) -> None:
    """Sets `use_muon` of each parameter."""
    for name, parameter in model.named_parameters():
        is_named = any(part in name.lower() for part in _FOR_ADAM)
        vars(parameter)["use_muon"] = parameter.dim() >= 2 and not is_named


def param_groups(parameters: Iterable[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divides parameters, or groups of them, into groups for Muon and groups for Adam.

    Args:
        parameters: with `use_muon`, see `set_optimizer_flags`.
        options: of the config. `muon_lr` and `adam_lr` are stronger than `lr`, and what a group says is stronger than both.
    """
    groups: list[Mapping[str, Any]] = []
    loose: list[Tensor] = []
    for item in parameters:
        if isinstance(item, Mapping):
            groups.append(item)
        else:
            loose.append(item)
    if loose:
        groups.append({"params": loose})
    halves: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        prefix = group.get("name")
        if prefix is None and len(groups) > 1:
            prefix = f"group{number}"
        for use_muon, label, defaults in ((True, "muon", _MUON_DEFAULTS), (False, "adam", _ADAM_DEFAULTS)):
            half = [each for each in group["params"] if each.requires_grad and vars(each)["use_muon"] is use_muon]
            if not half:
                continue
            settings = {key: options.get(key, default) for key, default in defaults.items()}
            settings["lr"] = options.get(f"{label}_lr", settings["lr"])
            settings.update({key: value for key, value in group.items() if key in defaults})
            name = f"{label}-params" if prefix is None else f"{prefix}-{label}-params"
            halves.append({"params": half, "use_muon": use_muon, "elementwise": not use_muon, "name": name, **settings})
    return halves


class MuonWithAdam(Muon):
    """Steps groups with `use_muon` by Muon, and the others by Adam.

    Args:
        groups: as `param_groups` returns them.
        decoupled: whether Adam's weight decay is decoupled.

    Attributes:
        max_norm: limit of the norm of Muon's orthogonal matrices and Adam's gradients together; 0 for none. Under ZeRO,
            DeepSpeed clips these and not the gradients. Each element must then be stepped by one rank.
    """

    iterates_in = "half precision"

    def __init__(self, groups: Sequence[dict[str, Any]], decoupled: bool = True) -> None:
        Optimizer.__init__(self, groups, {})
        self.decoupled = decoupled
        self.max_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step. Ranks: all, if there is a limit of the norm."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[list[Tensor]] = []  # for each group: directions of Muon, gradients of Adam
        stepped: list[list[Tensor]] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            stepped.append(parameters)
            if group["use_muon"]:
                updates.append([self.direction(parameter, group) for parameter in parameters])
            else:
                updates.append([parameter.grad for parameter in parameters])
        if self.max_norm:
            updates = _clipped(updates, self.max_norm)
        for group, parameters, group_updates in zip(self.param_groups, stepped, updates, strict=True):
            if not group["use_muon"]:
                self.step_by_adam(parameters, group_updates, group, self.decoupled)
                continue
            for parameter, direction in zip(parameters, group_updates, strict=True):
                step_along(parameter, direction, group)
        return loss

    def orthogonal(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """As in the base class, but "gram" iterates over the small square matrix, in float16 (float32 on a CPU).

        As DeepSpeed's: the scale of the filters of a convolution is that of their last two dimensions.
        """
        if matrix.dim() == 3:
            return torch.stack([self.orthogonal(one, group) for one in matrix])
        flat = matrix.flatten(1)
        if group["ns_method"] == "standard":
            result = newton_schulz(flat.bfloat16())
        else:
            result = _by_gram(flat)
        return result.to(matrix.dtype).mul(shape_scale(matrix)).reshape(matrix.shape)


def _clipped(updates: list[list[Tensor]], max_norm: float) -> list[list[Tensor]]:
    """Returns updates whose norm over all ranks is at most `max_norm`. Ranks: all."""
    own = [update for group_updates in updates for update in group_updates]
    # A number without dimensions is not divided by rows: every rank steps it.
    if dist.is_initialized() and dist.get_rank() > 0:
        own = [update for update in own if update.dim()]
    squares = torch.zeros((), device=own[0].device if own else None)
    for update in own:
        squares += update.float().square().sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm <= max_norm:
        return updates
    factor = max_norm / (norm + 1e-6)
    return [[update * factor for update in group_updates] for group_updates in updates]


def _by_gram(matrix: Tensor) -> Tensor:
    """The polynomials of `newton_schulz`, whose product is collected in a small matrix that is multiplied in twice."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    # The norm of float16 overflows.
    wide = wide.float() if wide.dtype == torch.float16 else wide
    wide = wide / (wide.norm() + _EPS)
    wide = wide.to(torch.float32 if wide.device.type == "cpu" else torch.float16)
    if wide.shape[0] == wide.shape[1]:
        result = newton_schulz(wide)
    else:
        result = _gram_iterations(wide)
    return result.mT if is_tall else result


def _gram_iterations(wide: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    identity = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    for num_iterations in (_RESTART, NUM_ITERATIONS - _RESTART):
        gram = wide @ wide.mT
        product = identity
        for _ in range(num_iterations):
            factor = a * identity + b * gram + c * gram @ gram
            product = factor @ product
            gram = factor @ gram @ factor
        wide = product @ wide
    return wide
