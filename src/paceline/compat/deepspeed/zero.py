"""`deepspeed.zero`: models are built as always, and whole parameters are seen inside `GatheredParameters`.

DeepSpeed divides a parameter in place, so that a script finds it empty outside of a `with` block. Here a divided parameter
is a DTensor, which shows its whole shape; what a block does on top of that is to give plain values to read and to change.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import preparation
from paceline.base.errors import CompatError
from paceline.base.log import warn_once
from paceline.parallel import shard
from paceline.parallel.fsdp import part_of, undisturbed
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

    def __init__(self, module: nn.Module | None = None, *args: Any, remote_device: Any = None, **named: Any) -> None:
        if remote_device not in (None, "none", "cpu"):
            warn_once(
                "compat",
                f"zero.Init(remote_device={str(remote_device)!r}): the model is built in the host's memory. "
                "`offload_param` in the config says where it goes.",
            )

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *failure: Any) -> None:
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

    Ranks: all open and close it.

    Raises:
        CompatError: `deepspeed-gather-open`, where one of them is whole already in a block around this one.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = list(dict.fromkeys(p for p in given if isinstance(p, Tensor))) if enabled else []
        self._modifier = modifier_rank
        self._open: Any = None

    def __enter__(self) -> None:
        self._open = _gathered(self._params, self._modifier)
        self._open.__enter__()

    def __exit__(self, *failure: Any) -> None:
        opened, self._open = self._open, None
        opened.__exit__(*failure)


_WHOLE: set[int] = set()  # parameters that are whole at the moment, by `id`


@contextmanager
def _gathered(params: list[Tensor], modifier: int | None) -> Iterator[None]:
    own = _of_engines(params)
    divided = [p for p in own if is_sharded(p)]
    nested = [p for p in own if id(p) in _WHOLE]
    if nested:
        raise CompatError(
            "deepspeed-gather-open",
            f"{len(nested)} parameters are gathered already, in a GatheredParameters block around this one.",
            why="the inner block would take what the outer one is changing",
            fix="gather all parameters in the outer block",
        )
    held: list[tuple[Any, Tensor, Any, Tensor]] = []
    swapped: list[tuple[nn.Module, str, Any]] = []
    for parameter in divided:
        held.append((parameter, local(parameter), parameter._spec, whole(parameter.detach())))
    _WHOLE.update(map(id, own))
    for parameter, _, _, value in held:
        plain = nn.Parameter(value, parameter.requires_grad)
        for module, name in _places(parameter):
            module._parameters[name] = plain
            swapped.append((module, name, parameter))
        parameter._local_tensor, parameter._spec = value, _replicated(parameter._spec)
    try:
        with ExitStack() as stack:
            if held:
                from torch.distributed.tensor.experimental import implicit_replication

                stack.enter_context(implicit_replication())
                for each in _models():
                    stack.enter_context(undisturbed(each.module))
            yield
    finally:
        _WHOLE.difference_update(map(id, own))
        for module, name, parameter in swapped:
            module._parameters[name] = parameter
        for parameter, part, spec, _ in held:
            parameter._local_tensor, parameter._spec = part, spec
    if modifier is not None:
        with torch.no_grad():
            for parameter, part, _, value in held:
                _broadcast(value, modifier)
                part.copy_(part_of(value, parameter))
            for parameter in own:
                if not is_sharded(parameter):
                    _broadcast(parameter.detach(), modifier)


def _replicated(spec: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)


def _broadcast(tensor: Tensor, src: int) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src)


def _of_engines(params: list[Tensor]) -> list[Any]:
    """Those that belong to a prepared model; ready to be gathered."""
    wanted = {id(p) for p in params}
    known = set()
    for each in _models():
        own = {id(p) for p in each.module.parameters()} & wanted
        if own and each.wrapped in shard._UNITS:
            shard._UNITS[each.wrapped].reshard()
        known |= own
    return [p for p in params if id(p) in known]


def _models() -> Iterator[Any]:
    for prepared in list(preparation._alive):
        yield from prepared.models


def _places(parameter: Any) -> list[tuple[nn.Module, str]]:
    modules = (module for each in _models() for module in each.module.modules())
    return [(m, name) for m in modules for name, own in m._parameters.items() if own is parameter]
