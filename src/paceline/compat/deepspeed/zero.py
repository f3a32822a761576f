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

from paceline.base.log import warn_once
from paceline.compat.deepspeed.processes import init_distributed
from paceline.parallel.divided_parameters import part_of, undisturbed
from paceline.run import live_runs
from paceline.torch_internals.dtensor import show_as_replica
from paceline.torch_internals.modules import parameter_table
from paceline.world.sharded import is_sharded, local, whole


class ZeroParamType(enum.Enum):
    """Kinds of parameters that DeepSpeed tells apart."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter can be used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """`with deepspeed.zero.Init(): model = Net()`: the model that a script would have built without it.

    The same values come out as without the block, at every width: parameters are divided by `initialize`, unit by unit, and
    not while the model is built. Each rank holds the model in the host's memory until then; where that is too much, build it
    under `torch.device("meta")`, for `initialize` gives such a model its values part by part.

    Args:
        module: nothing to do for one that is built.
        dtype, config_dict_or_path, enabled and others: the config of `initialize` decides.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *args: object,
        remote_device: str | torch.device | None = None,
        **keywords: object,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            warn_once(
                "compat",
                f"zero.Init(remote_device={str(remote_device)!r}): the model is built in the host's memory. "
                "`offload_param` in the config says where it goes.",
            )

    def __enter__(self) -> Init:
        # Whoever loads weights inside asks torch for this process's rank, also where there is one process alone.
        init_distributed()
        return self

    def __exit__(self, *failure: object) -> None:
        return None


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module uses is gathered with its own unit."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do."""


class GatheredParameters:
    """While it is open, parameters that are divided are whole.

    In the model they are plain parameters; a name that the script took before stands for a whole replica, which mixes with
    plain tensors. Without an engine nothing is divided, and nothing happens.

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

    def __enter__(self) -> None:
        self._open = _gathered(self._params, self._modifier)
        self._open.__enter__()

    def __exit__(self, *failure: object) -> None:
        opened = self._open
        self._open = None
        opened.__exit__(*failure)


class _Whole:
    """A parameter that is whole at the moment.

    Attributes:
        value: all of it.
        modifier: whose changes count at the end; None: nobody's.
    """

    def __init__(self, value: Tensor, modifier: int | None) -> None:
        self.value = value
        self.modifier = modifier


_WHOLE: dict[int, _Whole] = {}  # by the parameter's `id`


@contextmanager
def _gathered(params: list[Tensor], modifier: int | None) -> Iterator[None]:
    outer: list[_Whole] = []  # whole already, by a block around this one, which puts them back
    parameters: list[Any] = []  # that this block makes whole
    for parameter in _of_engines(params):
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
        _WHOLE[id(parameter)] = _Whole(whole(parameter.detach()), modifier)
    show_parts_again: list[Callable[[], None]] = []
    for parameter in sharded_parameters:
        value = _WHOLE[id(parameter)].value
        # The model gets a plain parameter, for what a script computes with it; the DTensor, which a script may have taken
        # from `named_parameters` before, shows the same memory.
        plain = nn.Parameter(value, parameter.requires_grad)
        for module, name in places[id(parameter)]:
            parameter_table(module)[name] = plain
        show_parts_again.append(show_as_replica(parameter, value))
    try:
        with ExitStack() as stack:
            if sharded_parameters:
                from torch.distributed.tensor.experimental import implicit_replication

                stack.enter_context(implicit_replication())
                for prepared in _models():
                    stack.enter_context(undisturbed(prepared.module))
            yield
    finally:
        gathered = {id(parameter): _WHOLE.pop(id(parameter)) for parameter in parameters}
        for parameter in sharded_parameters:
            for module, name in places[id(parameter)]:
                parameter_table(module)[name] = parameter
        for show_part_again in show_parts_again:
            show_part_again()
    # What this block changes in a parameter of an outer one goes to all ranks now, and into the parts when that one ends.
    if modifier is not None:
        for entry in outer:
            entry.modifier = modifier
            _broadcast(entry.value, modifier)
    with torch.no_grad():
        for parameter in parameters:
            # An inner block may have named another modifier meanwhile.
            entry = gathered[id(parameter)]
            if entry.modifier is None:
                continue
            _broadcast(entry.value, entry.modifier)
            if id(parameter) in parts:
                parts[id(parameter)].copy_(part_of(entry.value, parameter))


def _broadcast(tensor: Tensor, src: int) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src)


def _of_engines(params: list[Tensor]) -> list[Any]:
    """Those that belong to a prepared model; ready to be gathered."""
    wanted_ids = {id(parameter) for parameter in params}
    prepared_ids = wanted_ids & _WHOLE.keys()
    for prepared in _models():
        model_ids = {id(parameter) for parameter in prepared.module.parameters()}
        if model_ids & wanted_ids:
            # FSDP may still hold whole parameters from the last forward pass, which would be the ones to change.
            prepared.chain.reshard()
        prepared_ids |= model_ids & wanted_ids
    return [parameter for parameter in params if id(parameter) in prepared_ids]


def _models() -> Iterator[Any]:
    for run in live_runs():
        yield from run.prepared.models


def _places(parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """Where a parameter stands in prepared models: several places, where its weights are tied."""
    places = []
    for prepared in _models():
        for module in prepared.module.modules():
            for name, candidate in parameter_table(module).items():
                if candidate is parameter:
                    places.append((module, name))
    return places
