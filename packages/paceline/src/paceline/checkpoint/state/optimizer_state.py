"""An optimizer's state by parameter name.

torch numbers parameters in the order of the groups, which another plan may change; names stay. Unlike torch's own
`get_optimizer_state_dict`, nothing here takes a step to create states: a parameter without one (frozen, unused, or
never stepped) has none in the checkpoint and none after a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.state.codec import Encoder, decode, references
from paceline.world.sharded import division_of, is_sharded, local


@dataclass
class OptimizerState:
    """An optimizer and the names of its parameters.

    Attributes:
        optimizer: torch's, not a wrapper around it.
        parameters: its parameters by name, in the order of its groups.
        groups: for each parameter's name, the number of its group.
    """

    optimizer: Optimizer
    parameters: dict[str, Tensor]
    groups: dict[str, int]

    @classmethod
    def of(cls, optimizer: Optimizer, names: Mapping[Tensor, str]) -> OptimizerState:
        """Names each parameter; one that has no name is called after its place, `unnamed.GROUP.NUMBER`."""
        parameters: dict[str, Tensor] = {}
        groups: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"unnamed.{number}.{index}")
                parameters[name] = parameter
                groups[name] = number
        return cls(optimizer, parameters, groups)

    def encode(self, encoder: Encoder, path: str) -> dict[str, Any]:
        """JSON of hyper-parameters and numbers; tensors are left with the encoder, at `path/PARAMETER/KEY`."""
        state = dict(self.optimizer.state_dict())
        names = list(self.parameters)
        groups = [dict(group) for group in state.pop("param_groups")]
        for group in groups:
            del group["params"]
        encoded_groups = encoder.items(groups, f"{path}/groups")
        state_by_name: dict[str, Any] = {}
        other: dict[Any, Any] = {}  # what an optimizer of the user's own keeps beside its parameters
        for key, item in state.pop("state").items():
            if isinstance(key, int):
                state_by_name[names[key]] = encoder.encode(item, f"{path}/{names[key]}")
            else:
                other[key] = item
        return {
            "type": type(self.optimizer).__qualname__,
            "groups": encoded_groups,
            "members": self.groups,
            "state": state_by_name,
            "other": encoder.encode(other, f"{path}/other"),
            "extra": encoder.encode(state, f"{path}/extra"),
        }

    def targets(self, saved: Mapping[str, Any], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Any]:
        """Empty tensors for the states of this rank's parameters, by their path in the checkpoint.

        Args:
            saved: what `encode` gave.
            shapes: shape and dtype of each tensor in the checkpoint.

        Returns:
            A state of its parameter's shape lies where the parameter lies, sharded as it is, or as the optimizer divides
            its states; others on the CPU.
        """
        targets = {}
        for name, parameter in self.parameters.items():
            division = division_of(self.optimizer, parameter)
            # With ZeRO each state lies on some ranks only; the others do not read it.
            if division is not None and not division.keeps(parameter):
                continue
            for path in references(saved["state"].get(name)):
                shape, dtype = shapes[path]
                if shape == parameter.shape and division is not None:
                    targets[path] = division.empty(parameter, dtype)
                elif shape == parameter.shape:
                    targets[path] = torch.empty_like(parameter.detach(), dtype=dtype)
                else:
                    targets[path] = torch.empty(shape, dtype=dtype)
        for path in references([saved["groups"], saved["other"], saved["extra"]]):
            shape, dtype = shapes[path]
            targets[path] = torch.empty(shape, dtype=dtype)
        return targets

    def put(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Gives the states to the optimizer's `load_state_dict`, by its own numbers."""
        # torch's `load_state_dict` goes by the numbers of parameters, in the order of the groups of this run.
        numbers = {name: number for number, name in enumerate(self.parameters)}
        states = {}
        for name, parameter in self.parameters.items():
            division = division_of(self.optimizer, parameter)
            if name in saved["state"] and (division is None or division.keeps(parameter)):
                states[numbers[name]] = decode(saved["state"][name], tensors)
        groups: list[dict[str, Any]] = [{**decode(group, tensors), "params": []} for group in saved["groups"]]
        for name, number in numbers.items():
            groups[self.groups[name]]["params"].append(number)
        state = {**decode(saved["extra"], tensors), "state": {**decode(saved["other"], tensors), **states}}
        self.optimizer.load_state_dict({**state, "param_groups": groups})
        self._keep_dtypes(states)

    def _keep_dtypes(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        # torch casts a state to its parameter's dtype; one that was kept in another precision must stay exact.
        for number, parameter in enumerate(self.parameters.values()):
            state = self.optimizer.state.get(parameter, {})
            for key, value in states.get(number, {}).items():
                cast = state.get(key)
                if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                    exact = value if is_sharded(cast) else local(value)
                    state[key] = exact.to(cast.device)
