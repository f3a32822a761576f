"""The parameters of an optimizer, over all its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Parameter
    from torch.optim import Optimizer


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
    from torch.optim import Optimizer

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
