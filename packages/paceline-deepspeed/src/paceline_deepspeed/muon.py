"""`MuonWithAdam`: the optimizer that a DeepSpeed config calls Muon. It steps matrices by Muon, and the rest by Adam.

DeepSpeed decides by names and shapes: embeddings, heads (`lm_head`) and parameters with fewer than two dimensions go to Adam.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, for the coefficients; Dao et al., "Gram
Newton-Schulz", 2026, for the iteration over the small square matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.world.sharded import is_sharded, local, whole

NS_METHODS = ("gram", "standard")
_FOR_ADAM = ("embed", "lm_head")  # parts of names
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
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
            halves.append({"params": half, "use_muon": use_muon, "name": name, **settings})
    return halves


class MuonWithAdam(Optimizer):
    """Steps groups with `use_muon` by Muon, and the others by Adam.

    Args:
        groups: as `param_groups` returns them.
        decoupled: whether Adam's weight decay is decoupled.

    Attributes:
        max_norm: limit of the norm of Muon's orthogonal matrices and Adam's gradients together; 0 for none. Under ZeRO,
            DeepSpeed clips these and not the gradients. Each element must then be stepped by one rank.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], decoupled: bool = True) -> None:
        super().__init__(groups, {})
        self.decoupled = decoupled
        self.max_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step. Ranks: all that have a part of a divided matrix, because each matrix is gathered."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[Tensor] = []  # this rank's parts: a direction for Muon, a gradient for Adam
        stepped: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stepped.append((parameter, group))
                    updates.append(self._direction(parameter, group) if group["use_muon"] else local(parameter.grad))
        if self.max_norm:
            updates = _clipped(updates, self.max_norm)
        for (parameter, group), update in zip(stepped, updates, strict=True):
            if group["use_muon"]:
                values = local(parameter)
                values.mul_(1 - group["lr"] * group["weight_decay"])
                values.add_(update, alpha=-group["lr"])
            else:
                self._adam(parameter, update, group)
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns this rank's part of the orthogonal matrix along which a parameter is stepped."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        # Nesterov's form looks one step ahead.
        ahead = torch.lerp(parameter.grad, momentum, group["momentum"])
        # The product of matrices needs the whole matrix; each rank keeps its part of the result.
        direction = orthogonal(whole(ahead), group["ns_method"])
        if not is_sharded(parameter):
            return direction
        from torch.distributed.tensor import DTensor

        mesh = parameter.device_mesh
        replicated = DTensor.from_local(direction, mesh, run_check=False)
        part: Tensor = local(replicated.redistribute(mesh, parameter.placements))
        return part

    def _adam(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        values = local(parameter)
        if not self.decoupled:
            gradient = gradient.add(values, alpha=group["weight_decay"])
        state["step"] += 1
        num_steps = state["step"].item()
        first, second = group["betas"]
        average, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.decoupled:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (square / (1 - second**num_steps)).sqrt_().add_(group["eps"])
        values.addcdiv_(average, denominator, value=-group["lr"] / (1 - first**num_steps))


def _clipped(updates: list[Tensor], max_norm: float) -> list[Tensor]:
    """Returns updates whose norm over all ranks is at most `max_norm`. Ranks: all."""
    squares = torch.zeros((), device=updates[0].device if updates else None)
    for update in updates:
        squares += update.float().square().sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm <= max_norm:
        return updates
    return [update * (max_norm / (norm + 1e-6)) for update in updates]


def orthogonal(matrix: Tensor, method: str) -> Tensor:
    """Returns a nearly orthogonal matrix with the singular vectors of `matrix`, scaled by its shape.

    Args:
        matrix: [..., rows, columns]; with 4 dimensions, filters of a convolution, of which each is one row.
        method: "gram" iterates over the small square matrix, "standard" over the whole one.

    The iterations run in float16 ("gram"; float32 on a CPU) or in bfloat16 ("standard"), as DeepSpeed's do.
    """
    rows, columns = matrix.shape[-2:]
    scale = math.sqrt(max(1.0, rows / columns))
    flat = matrix.flatten(1) if matrix.dim() == 4 else matrix
    is_tall = flat.shape[-2] > flat.shape[-1]
    wide = flat.mT if is_tall else flat
    if method == "standard":
        wide = wide.to(torch.bfloat16)
    else:
        # The norm of float16 overflows.
        wide = wide.float() if wide.dtype == torch.float16 else wide
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + _EPS)
    if method == "gram":
        wide = wide.to(torch.float32 if wide.device.type == "cpu" else torch.float16)
    if method == "gram" and wide.shape[-1] > wide.shape[-2]:
        result = _gram_iterations(wide)
    else:
        result = _standard_iterations(wide)
    if is_tall:
        result = result.mT
    return result.to(matrix.dtype).mul(scale).reshape(matrix.shape)


def _standard_iterations(wide: Tensor) -> Tensor:
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def _gram_iterations(wide: Tensor) -> Tensor:
    """The same polynomials, whose product is collected in a small matrix that is multiplied into `wide` twice."""
    a, b, c = _COEFFICIENTS
    identity = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    for num_iterations in (_RESTART, _NUM_ITERATIONS - _RESTART):
        gram = wide @ wide.mT
        product = identity
        for _ in range(num_iterations):
            factor = a * identity + b * gram + c * gram @ gram
            product = factor @ product
            gram = factor @ gram @ factor
        wide = product @ wide
    return wide
