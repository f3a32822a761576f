"""Removes from an optimizer what other stages of a pipeline hold, for `rebind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def without_other_stages(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    current: Sequence[Mapping[str, Tensor]],
    tied: Sequence[Sequence[Sequence[str]]],
    sharing: Sequence[Optimizer],
) -> dict[int, tuple[int, str]]:
    """Removes the parameters of other stages, and their states, from the optimizer and from those that share its groups.

    Returns:
        The names of the other parameters. A tied parameter has a name under which this rank holds it.
    """
    here: dict[int, tuple[int, str]] = {}
    for key, (number, name) in before.items():
        names: Sequence[str] = [name]
        for group_of_names in tied[number]:
            if name in group_of_names:
                names = group_of_names
                break
        names_here = [alias for alias in names if alias in current[number]]
        if names_here:
            here[key] = (number, names_here[0])
    elsewhere = before.keys() - here.keys()
    kept: list[list[bool]] = []
    for group in optimizer.param_groups:
        is_here = [id(parameter) not in elsewhere for parameter in group["params"]]
        for parameter in compress(group["params"], map(not_, is_here)):
            for holder in (optimizer, *sharing):
                holder.state.pop(parameter, None)
        group["params"] = list(compress(group["params"], is_here))
        kept.append(is_here)
    for holder in (optimizer, *sharing):
        _take_own_states(holder, kept)
    return here


def _take_own_states(optimizer: Optimizer, kept: Sequence[Sequence[bool]]) -> None:
    """Lets `load_state_dict` take the states of all parameters, such as those of one process, of which this rank has some.

    Args:
        optimizer: changed in place.
        kept: for each group, which of its parameters this rank has.
    """

    def own(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = saved["param_groups"]
        if [len(group["params"]) for group in groups] != list(map(len, kept)):
            return saved
        own_groups = []
        states = dict(saved["state"])
        for group, is_here in zip(groups, kept, strict=True):
            own_groups.append({**group, "params": list(compress(group["params"], is_here))})
            for number in compress(group["params"], map(not_, is_here)):
                states.pop(number, None)
        return {**saved, "state": states, "param_groups": own_groups}

    optimizer.register_load_state_dict_pre_hook(own)
