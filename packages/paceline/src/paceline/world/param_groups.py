"""The parameters of an optimizer, over all its groups, and those that it steps element by element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

# torch's optimizers have no attribute that says it. Any other class has `elementwise = True` in its own body, which is not
# inherited: a subclass may step in another way.
_ELEMENTWISE_OF_TORCH = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of an optimizer, group by group."""
    parameters: list[Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers through which an optimizer of the user's own steps, such as those inside of SAM and Lookahead.

    They are attributes of it, or in a list or a dictionary that is one.
    """
    optimizers = [optimizer]
    for holder in optimizers:  # which grows meanwhile
        for attribute in vars(holder).values():
            values: Iterable[object] = (attribute,)
            if isinstance(attribute, list | tuple):
                values = attribute
            elif type(attribute) is dict:
                values = attribute.values()
            optimizers += [value for value in values if isinstance(value, Optimizer) and value not in optimizers]
    return optimizers[1:]


def parameters_by_number(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[int, Parameter]:
    """Returns the parameters of an optimizer by the numbers that a state dict of it has for them.

    torch numbers parameters in the order of the groups. Groups of other sizes are refused by `load_state_dict` itself,
    after its hooks, so surplus numbers or parameters are left out here.
    """
    numbers: list[int] = []
    for group in state_dict["param_groups"]:
        numbers += group["params"]
    return dict(zip(numbers, parameters_of(optimizer), strict=False))


def elementwise_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Returns the parameters whose elements the step of an optimizer treats independently of each other.

    An optimizer that steps its groups in different ways writes `elementwise=True` into those for which it holds.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE_OF_TORCH or vars(kind).get("elementwise"):
        return parameters_of(optimizer)
    parameters: list[Parameter] = []
    for group in optimizer.param_groups:
        if group.get("elementwise"):
            parameters += group["params"]
    return parameters


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether the step of an optimizer treats each element of all its parameters independently."""
    return len(elementwise_parameters(optimizer)) == len(parameters_of(optimizer))


def steps_whole_parameters(optimizer: Optimizer) -> bool:
    """Returns whether the step of an optimizer may look at a whole parameter, so that it needs some of them whole."""
    return not is_elementwise(optimizer) and not inner_optimizers(optimizer)
