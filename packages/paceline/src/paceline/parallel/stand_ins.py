"""Stand-ins: during a step the groups of an optimizer hold other tensors than the parameters.

user's hooks before the step     they see the parameters and gradients
stand-ins replace parameters     and get the states of the parameters
the optimizer steps
parameters replace stand-ins     then the code that has swapped them passes the changes on
user's hooks after the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.torch_internals.tensors import dtensor
from paceline.world.param_groups import elementwise_parameters
from paceline.world.sharded import is_sharded, local

# Attributes of a stand-in: the model's parameter, and the tensor whose memory it shares.
_STANDS_FOR = "_stands_for"
_DATA = "_shared_data"


def stand_in(parameter: Tensor, data: Tensor, grad: Tensor | None) -> nn.Parameter:
    """Returns a parameter that shares the memory of `data`, with the attributes that the user has set on the real one."""
    stand = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(stand).update(vars(parameter))
    vars(stand)[_STANDS_FOR] = original(parameter)
    vars(stand)[_DATA] = data
    stand.grad = grad
    return stand


def original(parameter: Tensor) -> Tensor:
    """Returns the model's parameter for a stand-in, also for a stand-in of a stand-in; a model's parameter itself."""
    model_parameter: Tensor = vars(parameter).get(_STANDS_FOR, parameter)
    return model_parameter


@contextmanager
def stand_ins(optimizer: Optimizer, make: Callable[[Tensor], Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While it is open, the optimizer holds `make(parameter)` in place of each parameter.

    Yields:
        The pairs (parameter, stand-in) that are different objects.
    """
    before = [group["params"] for group in optimizer.param_groups]
    pairs: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        stands = [make(parameter) for parameter in group["params"]]
        for parameter, stand in zip(group["params"], stands, strict=True):
            if stand is not parameter:
                pairs.append((parameter, stand))
        group["params"] = stands
    try:
        _rename(optimizer, pairs)
        yield pairs
        if not type(optimizer).__module__.startswith("torch."):
            _share_again(pairs)
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        swapped_pairs = [(stand, parameter) for parameter, stand in pairs]
        _rename(optimizer, swapped_pairs)


def _share_again(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies the values of stand-ins that have other memory since an optimizer wrote `parameter.data = value`."""
    for _, stand in pairs:
        data: Tensor = vars(stand)[_DATA]
        if stand.data_ptr() != data.data_ptr():
            data.detach().copy_(stand.detach())


def step_local_parts(adapter: OptimizerAdapter) -> None:
    """Makes an optimizer step the local tensor of each DTensor whose elements are independent, with the same results.

    Otherwise DTensor searches for the sharding of an operation over all parameters, which took a third of a run's first step.
    Between steps the states are DTensors, as checkpoints need them.
    """
    if any(map(is_sharded, elementwise_parameters(adapter.optimizer))):
        adapter.swap(_on_local_parts)


@contextmanager
def _on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    independent = set(elementwise_parameters(optimizer))

    def local_part(parameter: Tensor) -> Tensor:
        if not is_sharded(parameter) or parameter not in independent:
            return parameter
        gradient = parameter.grad
        if is_sharded(gradient) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return stand_in(parameter, local(parameter), local(gradient))

    divided_states: dict[int, Tensor] = {}  # by the `id` of this rank's part, which they keep alive
    with stand_ins(optimizer, local_part) as pairs:
        for _, part in pairs:
            state = optimizer.state.get(part, {})
            for key, value in state.items():
                if is_sharded(value):
                    state[key] = local(value)
                    divided_states[id(state[key])] = value
        try:
            yield
        finally:
            for parameter, part in pairs:
                state = optimizer.state.get(part, {})
                for key, value in state.items():
                    if id(value) in divided_states:
                        state[key] = divided_states[id(value)]
                    elif isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                        assert is_sharded(parameter)
                        shape, strides = parameter.shape, parameter.stride()
                        state[key] = dtensor(value, parameter.device_mesh, parameter.placements, shape, strides)


def _rename(optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Moves the state of the first tensor of each pair to the second: `optimizer.state` has tensors for keys."""
    for old, new in pairs:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
