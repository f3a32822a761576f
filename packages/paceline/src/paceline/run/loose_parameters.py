"""Parameters that are in no module, such as the temperature of SAC or the weights of several losses.

Each process computes a gradient of them from its own samples. So they need the same average as those of a model: they become
the parameters of a module that is prepared beside the models. A plan that divides parameters would put others in their place,
of which the script's own loss knows nothing. So every process keeps them whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.plan.plan import Plan
from paceline.torch_internals.modules import as_parameter
from paceline.world.param_groups import parameters_of


class LooseParameters(nn.Module):
    """Holds the tensors themselves, which the script's loss is computed from."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_parameter(f"parameter{number}", as_parameter(tensor))


def is_loose(value: object) -> TypeGuard[Tensor]:
    """Returns whether an object is a tensor that an optimizer may step: a leaf that requires a gradient."""
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def loose_in(optimizers: Iterable[Optimizer], known: Container[int]) -> list[Tensor]:
    """Returns the tensors of optimizers that can be in no module, since they are no `nn.Parameter`.

    Args:
        optimizers: the user's.
        known: ids of the parameters of models.
    """
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for tensor in parameters_of(optimizer):
            if id(tensor) not in known and not isinstance(tensor, nn.Parameter) and is_loose(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def are_followed(plan: Plan) -> bool:
    """Returns whether a plan can hold them: its processes divide samples, and not layers or sequences."""
    return plan.layout.size() == plan.layout.width
