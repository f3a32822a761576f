"""The attributes that DeepSpeed gives each parameter at stage 3, by which scripts find out what they have to gather.

    if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
        with deepspeed.zero.GatheredParameters([p]): ...

A script that does not find them takes a divided parameter for a plain one, and writes this rank's rows into its file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.torch_internals import fsdp as internals

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ZeroParamStatus(enum.Enum):
    """Whether a parameter can be used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_IDS = count()


class ParameterOffload:
    """`engine.optimizer.parameter_offload` of stage 3, as far as trl needs it.

    Before it generates, trl removes the hooks by which DeepSpeed gathers parameters, and registers them again afterwards.
    Here nothing has to be removed: inside of `GatheredParameters` the units of a model are not gathered.

    Attributes:
        module: lists the parameters of the model under the names that trl calls.
        forward_hooks, backward_hooks: empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = _Listing(model)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: object) -> None:
        """Does nothing."""


class _Listing:
    """The two methods of a module that trl calls on `parameter_offload.module`."""

    def __init__(self, model: nn.Module) -> None:
        self.named_parameters = model.named_parameters

    def ds_external_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Returns nothing: a parameter that another module uses is gathered with its own unit."""
        return ()


def describe(model: nn.Module, parameters_before: Iterable[Tensor]) -> None:
    """Gives the parameters of a model at stage 3 their attributes; inside of a forward pass they are available.

    On one process too, where nothing is divided: DeepSpeed's scripts then open blocks that have nothing to do.

    Args:
        model: after `prepare`.
        parameters_before: those that `prepare` replaced, which a script may still hold.
    """
    from torch.distributed.fsdp import FSDPModule  # loads torch's tensors, which take half a second

    describe_new((*model.parameters(), *parameters_before))
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            _describe_when_gathered(unit)


def describe_new(parameters: Iterable[Tensor]) -> None:
    """Gives each parameter that has none yet a number, and says that it has to be gathered."""
    for parameter in parameters:
        if not hasattr(parameter, "ds_id"):
            _write(parameter, next(_IDS), ZeroParamStatus.NOT_AVAILABLE)


def describe_whole(whole: Tensor, sharded: Tensor) -> None:
    """Gives the whole form of a described parameter the same number, and says that it is available."""
    number = getattr(sharded, "ds_id", None)
    if number is not None:
        _write(whole, number, ZeroParamStatus.AVAILABLE)


def change_status(parameters: Iterable[Tensor], before: ZeroParamStatus, after: ZeroParamStatus) -> list[Tensor]:
    """Changes the status of the described parameters that have the status `before`, and returns them."""
    changed: list[Any] = [parameter for parameter in parameters if getattr(parameter, "ds_status", None) is before]
    for parameter in changed:
        parameter.ds_status = after
    return changed


def _write(parameter: Any, number: int, status: ZeroParamStatus) -> None:
    parameter.ds_id = number
    parameter.ds_status = status
    parameter.ds_shape = parameter.shape
    parameter.ds_numel = parameter.numel()
    parameter.ds_active_sub_modules = set()


def _describe_when_gathered(unit: FSDPModule) -> None:
    """Describes the whole parameters of a unit, which FSDP2 makes in its first forward pass and keeps."""

    def before_forward(*_: object) -> None:
        for group in internals.parameter_groups(unit):
            for member in internals.group_parameters(group):
                whole = internals.whole_parameter(member)
                if whole is not None:
                    describe_whole(whole, internals.sharded_parameter(member))
        hook.remove()

    # FSDP2's own hook, which gathers, was registered as the first one.
    hook = unit.register_forward_pre_hook(before_forward)  # type: ignore[attr-defined]
