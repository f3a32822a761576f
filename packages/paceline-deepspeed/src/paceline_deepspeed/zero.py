"""`deepspeed.zero`: models are built as always, and whole parameters are seen inside `GatheredParameters`.

DeepSpeed divides a parameter in place, so that a script finds it empty outside of a `with` block. Here a divided parameter
is a DTensor, which shows its whole shape; what a block does on top of that is to give plain values to read and to change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.base.log import warn_once
from paceline.parallel.divided_parameters import part_of, undisturbed
from paceline.run.run import live_runs
from paceline.torch_internals.modules import parameter_table
from paceline.world.sharded import is_sharded, local, whole
from paceline.world.tree import map_tensors
from paceline_deepspeed import replaced
from paceline_deepspeed.parameter_status import ZeroParamStatus, change_status, describe_new, describe_whole
from paceline_deepspeed.processes import init_distributed
from paceline_deepspeed.torch_internals.dtensor import show_as_replica


class ZeroParamType(enum.Enum):
    """Kinds of parameters that DeepSpeed tells apart."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Init:
    """`with deepspeed.zero.Init(): model = Net()`: the model that a script would have built without it.

    The same values come out as without the block, at every width: parameters are divided by `initialize`, unit by unit, and
    not while the model is built. Each rank holds the model in the host's memory until then; where that is too much, build it
    under `torch.device("meta")`, for `initialize` gives such a model its values part by part.

    A parameter that is registered inside has the attributes of stage 3 at once (`ds_id`, `ds_shape`, `ds_status`), and so have
    those of a module that is given.

    Args:
        module: one that is built already.
        enabled: False does nothing.
        dtype, config_dict_or_path and others: the config of `initialize` decides.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *args: object,
        remote_device: str | torch.device | None = None,
        enabled: bool = True,
        **keywords: object,
    ) -> None:
        self._enabled = enabled
        self._hook: RemovableHandle | None = None
        if module is not None and enabled:
            describe_new(module.parameters())
        if remote_device not in (None, "none", "cpu"):
            warn_once(
                "compat",
                f"zero.Init(remote_device={str(remote_device)!r}): the model is built in the host's memory. "
                "`offload_param` in the config says where it goes.",
            )

    def __enter__(self) -> Init:
        # Whoever loads weights inside asks torch for this process's rank, also where there is one process alone.
        init_distributed()
        if self._enabled:
            self._hook = register_module_parameter_registration_hook(_describe_registered)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _describe_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Describes a parameter when a module gets it."""
    if parameter is not None:
        describe_new([parameter])


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter that another module uses is gathered with its own unit."""


unregister_external_parameter = register_external_parameter


class GatheredParameters:
    """While it is open, parameters that are divided are whole.

    In the model they are plain parameters. A parameter that the script took before, also before `initialize`, is read and
    changed like the plain one. Without an engine nothing is divided, and nothing happens.

    Args:
        params: one parameter or any iterable of them.
        modifier_rank: its changes reach all ranks at the end; None: changes are dropped, where parameters are divided.
        fwd_module: not needed.
        enabled: False does nothing.

    Blocks can be nested; what an inner one changes counts when the outer one ends.

    Ranks: all open and close it.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, Tensor):
            params = [params]
        self._params: list[Tensor] = []
        if enabled:
            tensors = [candidate for candidate in params if isinstance(candidate, Tensor)]
            self._params = list(dict.fromkeys(tensors))  # each once, in order: all ranks gather in the same order
        self._modifier = modifier_rank
        self._open: Any = None
        self._made_available: list[Tensor] = []  # by this block, and not by one around it

    def __enter__(self) -> None:
        self._open = _gathered(self._params, self._modifier)
        self._open.__enter__()
        self._made_available = change_status(self._params, ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE)

    def __exit__(self, *failure: object) -> None:
        opened = self._open
        self._open = None
        change_status(self._made_available, ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE)
        opened.__exit__(*failure)


class _WholeParameters:
    """A parameter that is whole at the moment.

    Attributes:
        value: all of it. Where the parameter is divided, this is the plain parameter that the model has meanwhile.
        modifier: whose changes count at the end; None: nobody's.
    """

    def __init__(self, value: Tensor, modifier: int | None) -> None:
        self.value = value
        self.modifier = modifier


_WHOLE: dict[int, _WholeParameters] = {}  # by the parameter's `id`


@contextmanager
def _gathered(params: list[Tensor], modifier: int | None) -> Iterator[None]:
    outer: list[_WholeParameters] = []  # whole already, by a block around this one, which puts them back
    parameters: list[Any] = []  # that this block makes whole
    # Two names of a parameter, one of them from before `initialize`, stand for one parameter.
    current_params = list(dict.fromkeys(replaced.current(parameter) for parameter in params))
    models = [prepared for prepared in _models() if _has_one(prepared, current_params)]
    # FSDP may still hold whole parameters from the last forward pass, which would be the ones to change.
    _divide_again(models)
    for parameter in _of_models(models, current_params):
        if id(parameter) in _WHOLE:
            outer.append(_WHOLE[id(parameter)])
        else:
            parameters.append(parameter)
    sharded_parameters: list[Any] = [parameter for parameter in parameters if is_sharded(parameter)]
    parts: dict[int, Tensor] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parameter in sharded_parameters:
        parts[id(parameter)] = local(parameter)
        places[id(parameter)] = _places(parameter)
    # All ranks gather one parameter after the other, before the first of them is replaced.
    for parameter in parameters:
        value = whole(parameter.detach())
        if id(parameter) in parts:
            value = nn.Parameter(value, parameter.requires_grad)
            describe_whole(value, parameter)
        _WHOLE[id(parameter)] = _WholeParameters(value, modifier)
    show_parts_again: list[Callable[[], None]] = []
    for parameter in sharded_parameters:
        value = _WHOLE[id(parameter)].value
        for module, name in places[id(parameter)]:
            parameter_table(module)[name] = value
        # For the methods of DTensor itself, such as `full_tensor`, which the mode below does not see.
        show_parts_again.append(show_as_replica(parameter, value.detach()))
    try:
        with ExitStack() as stack:
            if sharded_parameters:
                for prepared in _models():
                    stack.enter_context(undisturbed(prepared.module))
                stack.enter_context(_WholeValues([*params, *parameters]))
            yield
    finally:
        # After a forward pass in the block FSDP believes that its own whole parameters stand in the model.
        _divide_again(models)
        gathered = {id(parameter): _WHOLE.pop(id(parameter)) for parameter in parameters}
        for parameter in sharded_parameters:
            for module, name in places[id(parameter)]:
                parameter_table(module)[name] = parameter
        for show_part_again in show_parts_again:
            show_part_again()
        # Also after an exception, which a script may catch outside of the block; DeepSpeed keeps such changes too.
        # What this block changes in a parameter of an outer one goes to all ranks now, and into the parts when that one ends.
        if modifier is not None:
            for entry in outer:
                entry.modifier = modifier
                _broadcast(entry.value.detach(), modifier)
        with torch.no_grad():
            for parameter in parameters:
                # An inner block may have named another modifier meanwhile.
                entry = gathered[id(parameter)]
                if entry.modifier is None:
                    continue
                value = entry.value.detach()
                _broadcast(value, entry.modifier)
                if id(parameter) in parts:
                    parts[id(parameter)].copy_(part_of(value, parameter))


# What belongs to a parameter and not to its values: gradients are those of the divided one, also while it is whole.
_TENSOR_CLASS: Any = Tensor  # read from the class, these attributes are descriptors, which its annotations do not say
_OF_PARAMETER = (
    _TENSOR_CLASS.grad.__get__,
    _TENSOR_CLASS.grad.__set__,
    _TENSOR_CLASS.grad.__delete__,
    _TENSOR_CLASS.requires_grad.__set__,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
)


class _WholeValues(TorchFunctionMode):
    """While it is active, functions and methods of torch read and change the whole value of a divided parameter.

    A DTensor could not stand for it: `tolist` and `numpy` refuse one, and what is computed from it is a DTensor again, also
    in a file that `torch.save` writes.

    Args:
        params: parameters of a model, or those that it had before `initialize`.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self._values: dict[int, Tensor] = {}
        for parameter in params:
            entry = _WHOLE.get(id(replaced.current(parameter)))
            if entry is not None:
                self._values[id(parameter)] = entry.value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OF_PARAMETER:
            return function(*args, **(kwargs or {}))
        args, kwargs = map_tensors(self._value_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _value_of(self, tensor: Tensor) -> Tensor:
        return self._values.get(id(tensor), tensor)


def _broadcast(tensor: Tensor, src: int) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src)


def _has_one(prepared: Any, params: list[Tensor]) -> bool:
    """Returns whether one of the parameters stands in a prepared model."""
    model_ids = {id(replaced.current(parameter)) for parameter in prepared.module.parameters()}
    return any(id(parameter) in model_ids for parameter in params)


def _divide_again(models: list[Any]) -> None:
    for prepared in models:
        for applied in prepared.chain.strategies:
            applied.reshard()


def _of_models(models: list[Any], params: list[Tensor]) -> list[Any]:
    """Lists the parameters that stand in the models, or that a block around this one has made whole."""
    prepared_ids = set(_WHOLE)
    for prepared in models:
        prepared_ids |= {id(parameter) for parameter in prepared.module.parameters()}
    return [parameter for parameter in params if id(parameter) in prepared_ids]


def _models() -> Iterator[Any]:
    for run in live_runs():
        yield from run.prepared.models


def _places(parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """Lists where a parameter stands in prepared models: several places where its weights are tied."""
    places = []
    for prepared in _models():
        for module in prepared.module.modules():
            for name, candidate in parameter_table(module).items():
                if candidate is parameter:
                    places.append((module, name))
    return places
