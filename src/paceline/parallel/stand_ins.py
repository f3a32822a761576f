"""What an optimizer steps in place of the parameters: for the time of a step, its groups hold stand-ins.

user's hooks before the step     see parameters and gradients as they are
stand-ins take their places      and the states of the parameters become theirs
the optimizer steps
the parameters are back          then whoever swapped them passes on what changed
user's hooks after the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.torch_internals.tensors import first_after_step

Swap = Callable[[Optimizer], AbstractContextManager[Any]]
_STANDS_FOR = "_stands_for"  # an attribute of a stand-in: the model's parameter


def stand_in(parameter: Tensor, data: Tensor, grad: Tensor | None) -> nn.Parameter:
    """A parameter on the memory of `data`, with the attributes that the user gave the real one."""
    stand = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(stand).update(vars(parameter))
    vars(stand)[_STANDS_FOR] = original(parameter)
    stand.grad = grad
    return stand


def original(parameter: Tensor) -> Tensor:
    """The model's parameter that this one stands for; itself where it is the model's."""
    model_parameter: Tensor = vars(parameter).get(_STANDS_FOR, parameter)
    return model_parameter


@contextmanager
def stand_ins(optimizer: Optimizer, make: Callable[[Tensor], Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While it is open, the optimizer holds `make(parameter)` in place of each parameter; gives the pairs that differ."""
    before = [group["params"] for group in optimizer.param_groups]
    pairs = []
    for group in optimizer.param_groups:
        stands = [make(parameter) for parameter in group["params"]]
        for parameter, stand in zip(group["params"], stands, strict=True):
            if stand is not parameter:
                pairs.append((parameter, stand))
        group["params"] = stands
    try:
        _rename(optimizer, pairs)
        yield pairs
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        _rename(optimizer, [(stand, parameter) for parameter, stand in pairs])


def _rename(optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def swap_in_steps(optimizer: Optimizer, swap: Swap) -> None:
    """Lets the optimizer take each step inside of `swap(optimizer)`, next to the arithmetic: inside of the user's hooks.

    Steps with a closure are refused then: it would compute gradients of parameters that are elsewhere.
    """
    plain: Callable[..., Any] = optimizer.step

    @wraps(plain)  # and so with the mark by which a scheduler knows that it counts these steps
    def step(self: Optimizer, *args: object, **kwargs: object) -> Any:
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise closure_refused(self)
        opened = ExitStack()
        entered = False

        def enter(*_: object) -> None:
            nonlocal entered
            if not entered:  # a step that calls its superclass' step comes here twice
                entered = True
                opened.enter_context(swap(self))

        before = self.register_step_pre_hook(enter)  # now: the last one before the step
        after = first_after_step(self, lambda *_: opened.close())
        try:
            with opened:
                return plain(*args, **kwargs)
        finally:
            before.remove()
            after.remove()

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def closure_refused(optimizer: Optimizer) -> TrainError:
    """The error of an optimizer that computes the loss in its step."""
    return TrainError(
        "step-closure",
        f"{type(optimizer).__name__} cannot step with a closure under this plan.",
        why="its states are divided over ranks (zero=1 or 2) or wait on the host (offload), so that while it steps the "
        "model's parameters are not the ones it steps, and a closure would compute gradients of those",
        fix="call `step()` without a closure; for LBFGS, use plan={'zero': 0, 'shard': 1}",
    )


def step_held(optimizer: Optimizer) -> TrainError:
    """The error of an optimizer whose gradients have not been reduced."""
    return TrainError(
        "step-held",
        f"{type(optimizer).__name__} would step gradients that ranks have not shared.",
        why="the last backward pass ran inside of `no_sync` (or LocalSGD), was not `accelerator.backward`, or failed; under "
        "this plan each rank steps a part of the parameters, and would step it by its own samples alone",
        fix="end each step's gradients with an `accelerator.backward(loss)` outside of `no_sync`, or clear them: "
        "`optimizer.zero_grad()`",
    )
