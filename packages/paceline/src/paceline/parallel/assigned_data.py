"""Lets an optimizer of the user's own write `parameter.data = value` where the parameter is a DTensor.

torch changes nothing there, and says nothing: a DTensor keeps its values in another tensor. So SAM would not go back to where
it came from, and an optimizer that steps by `p.data = p.data - lr * p.grad` would not train. Where the loop itself writes so,
the next forward pass, step or `state_dict` says it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.base.errors import TrainError
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.torch_internals.tensors import without_torch_function
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def copy_assigned_data(adapter: OptimizerAdapter) -> None:
    """Makes the methods of an optimizer copy what they assign to `.data` of a DTensor; torch's own assign nothing.

    Its step refuses a parameter to which something else has assigned: TrainError `data-assigned`.
    """
    refuse = _RefuseAssignedData(parameters_of(adapter.optimizer))
    adapter.surround(lambda _: _CopyAssignedData())
    adapter.refuse(lambda optimizer: refuse(parameters_of(optimizer)))


def refuse_assigned_data(model: nn.Module) -> None:
    """Makes forward passes and `state_dict` of the model refuse parameters to which `parameter.data = value` was written.

    So parameters that are in no optimizer, as those of an average, are looked at, too. Call it when they are divided. The
    hook raises TrainError: `data-assigned`.
    """
    parameters = list(filter(is_sharded, model.parameters()))
    refuse = _RefuseAssignedData(parameters)
    model.register_forward_pre_hook(lambda *_: refuse(parameters), prepend=True)
    model.register_state_dict_pre_hook(lambda *_: refuse(parameters))


class _RefuseAssignedData:
    """Raises an error if `parameter.data = value` was written, outside of the optimizer's methods, since it looked last.

    The value is lost then, but the DTensor, which has no memory of its own, has got the storage object of the value: with the
    memory of a plain tensor, or beside the local values that it had before. Where the model was converted, as by
    `model.double()`, it has got new local values, too, and nothing is lost.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # torch gives the same object for as long as somebody has it.
        self._before = {parameter: _held(parameter) for parameter in parameters if is_sharded(parameter)}

    def __call__(self, parameters: Iterable[Tensor]) -> None:
        # A mode may show whole values in the place of a parameter's own, with a storage of theirs.
        with without_torch_function():
            for parameter in parameters:
                if is_sharded(parameter):
                    self._look_at(parameter)

    def _look_at(self, parameter: DTensor) -> None:
        before = self._before.get(parameter)
        if before is not None and parameter.untyped_storage() is before.storage:
            return
        self._before[parameter] = _held(parameter)
        is_first_look = before is None
        is_converted = before is not None and before.values() is not local(parameter).untyped_storage()
        if (is_first_look or is_converted) and parameter.data_ptr() == 0:
            return
        raise TrainError(
            "data-assigned",
            f"`parameter.data = value` was lost, for a parameter of shape {list(parameter.shape)}.",
            why="the parameter is divided over ranks, as a DTensor, whose values torch does not change in this way",
            fix="write in place: `parameter.data.copy_(value)`, `parameter.data.clamp_(-1, 1)`",
        )


class _Held(NamedTuple):
    """The storage objects of a DTensor.

    Attributes:
        storage: the one that it shows.
        values: that of its local values; weakly, since a conversion frees them.
    """

    storage: torch.UntypedStorage
    values: weakref.ref[torch.UntypedStorage]


def _held(parameter: Tensor) -> _Held:
    return _Held(parameter.untyped_storage(), weakref.ref(local(parameter).untyped_storage()))


class _CopyAssignedData(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and is_sharded(args[0]):
            return args[0].detach().copy_(args[1])
        return func(*args, **(kwargs or {}))
