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

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.torch_internals.optimizers import replace_orthogonalisation
from paceline.torch_internals.tensors import dtensor
from paceline.world.param_groups import inner_optimizers, parameters_of
from paceline.world.sharded import is_sharded, local, whole

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


# torch's optimizers have no attribute that says it. Any other class has `elementwise = True` in its own body, which is not
# inherited: a subclass may step in another way.
_ELEMENTWISE_OF_TORCH = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether the step of an optimizer treats each element of a parameter independently."""
    kind = type(optimizer)
    return kind in _ELEMENTWISE_OF_TORCH or bool(vars(kind).get("elementwise"))


def steps_whole_parameters(optimizer: Optimizer) -> bool:
    """Returns whether the step of an optimizer may look at a whole parameter, so that it needs each of them whole."""
    if is_elementwise(optimizer) or inner_optimizers(optimizer):
        return False
    # A subclass of Muon may step otherwise.
    return type(optimizer) is not torch.optim.Muon


def step_local_parts(adapter: OptimizerAdapter) -> None:
    """Makes an elementwise optimizer step the local tensor of each DTensor, with the same results.

    Otherwise DTensor searches for the sharding of an operation over all parameters, which took a third of a run's first step.
    Between steps the states are DTensors, as checkpoints need them.
    """
    optimizer = adapter.optimizer
    if is_elementwise(optimizer) and any(map(is_sharded, parameters_of(optimizer))):
        adapter.swap(_on_local_parts)


@contextmanager
def _on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    def local_part(parameter: Tensor) -> Tensor:
        if not is_sharded(parameter):
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


def step_whole_matrices(adapter: OptimizerAdapter) -> None:
    """Makes Muon orthogonalise whole matrices where they are divided, with the same results as one process.

    Each rank gathers one matrix at a time and keeps its part of the result. DTensor would divide the matrix products: their
    sums in bfloat16 round otherwise, and it refuses a matrix that has fewer rows or columns than there are ranks.
    """
    optimizer = adapter.optimizer
    if isinstance(optimizer, torch.optim.Muon) and any(map(is_sharded, parameters_of(optimizer))):
        adapter.swap(lambda _: replace_orthogonalisation(_on_whole_matrix))


def _on_whole_matrix(orthogonalise: Callable[..., Tensor], matrix: Tensor, *args: object, **kwargs: object) -> Tensor:
    result = orthogonalise(whole(matrix), *args, **kwargs)
    if not is_sharded(matrix):
        return result
    from torch.distributed.tensor import DTensor

    mesh = matrix.device_mesh
    return DTensor.from_local(result, mesh, run_check=False).redistribute(mesh, matrix.placements)


def _rename(optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Moves the state of the first tensor of each pair to the second: `optimizer.state` has tensors for keys."""
    for old, new in pairs:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
