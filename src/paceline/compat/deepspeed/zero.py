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

from paceline.base.log import warn_once
from paceline.compat.deepspeed.processes import init_distributed
from paceline.parallel.divided_parameters import part_of, undisturbed
from paceline.run import live_runs
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
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = list(dict.fromkeys(p for p in given if isinstance(p, Tensor))) if enabled else []
        self._modifier = modifier_rank
        self._open: Any = None

    def __enter__(self) -> None:
        self._open = _gathered(self._params, self._modifier)
        self._open.__enter__()

    def __exit__(self, *failure: object) -> None:
        opened, self._open = self._open, None
        opened.__exit__(*failure)


class _Whole:
    """A parameter that is whole at the moment.

    Attributes:
        value: all of it.
        modifier: whose changes count at the end; None: nobody's.
    """

    def __init__(self, value: Tensor, modifier: int | None) -> None:
        self.value, self.modifier = value, modifier


_WHOLE: dict[int, _Whole] = {}  # by the parameter's `id`


@contextmanager
def _gathered(params: list[Tensor], modifier: int | None) -> Iterator[None]:
    own = _of_engines(params)
    again = [_WHOLE[id(p)] for p in own if id(p) in _WHOLE]  # in a block around this one, which puts them back
    own = [p for p in own if id(p) not in _WHOLE]
    sharded_parameters: list[tuple[Any, Tensor, Any]] = [(p, local(p), p._spec) for p in own if is_sharded(p)]
    places = {id(p): _places(p) for p, _, _ in sharded_parameters}
    for parameter in own:
        _WHOLE[id(parameter)] = _Whole(whole(parameter.detach()), modifier)
    for parameter, _, spec in sharded_parameters:
        value = _WHOLE[id(parameter)].value
        plain = nn.Parameter(value, parameter.requires_grad)
        for module, name in places[id(parameter)]:
            module._parameters[name] = plain
        parameter._local_tensor, parameter._spec = value, _replicated(spec)
    try:
        with ExitStack() as stack:
            if sharded_parameters:
                from torch.distributed.tensor.experimental import implicit_replication

                stack.enter_context(implicit_replication())
                for prepared in _models():
                    stack.enter_context(undisturbed(prepared.module))
            yield
    finally:
        ended = {id(p): _WHOLE.pop(id(p)) for p in own}
        for parameter, part, spec in sharded_parameters:
            for module, name in places[id(parameter)]:
                module._parameters[name] = parameter
            parameter._local_tensor, parameter._spec = part, spec
    if modifier is not None:
        for outer in again:
            outer.modifier = modifier
            _broadcast(outer.value, modifier)
    parts = {id(p): part for p, part, _ in sharded_parameters}
    with torch.no_grad():
        for parameter in own:
            seen = ended[id(parameter)]
            if seen.modifier is not None:
                _broadcast(seen.value, seen.modifier)
                if id(parameter) in parts:
                    parts[id(parameter)].copy_(part_of(seen.value, parameter))


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
    prepared_ids = set()
    for prepared in _models():
        own = {id(p) for p in prepared.module.parameters()} & wanted
        if own:
            prepared.chain.reshard()
        prepared_ids |= own
    prepared_ids |= wanted & _WHOLE.keys()
    return [p for p in params if id(p) in prepared_ids]


def _models() -> Iterator[Any]:
    for run in live_runs():
        yield from run.prepared.models


def _places(parameter: Tensor) -> list[tuple[nn.Module, str]]:
    modules = (module for prepared in _models() for module in prepared.module.modules())
    return [(m, name) for m in modules for name, own in m._parameters.items() if own is parameter]
