"""The parameters of an optimizer, over all its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of an optimizer, group by group."""
    parameters: list[Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def parameters_by_number(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[int, Parameter]:
    """The parameters of an optimizer by the numbers that a state dict of it has for them.

    torch numbers parameters in the order of the groups. Groups of other sizes are refused by `load_state_dict` itself,
    after its hooks, so surplus numbers or parameters are left out here.
    """
    numbers: list[int] = []
    for group in state_dict["param_groups"]:
        numbers += group["params"]
    return dict(zip(numbers, parameters_of(optimizer), strict=False))
