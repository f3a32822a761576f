"""What `shard` and the composed form of `replicate` share: both are FSDP2 states on modules, see `Units`.

broadcast_values     before: every rank starts with the first rank's values
Units.hold           backward passes keep whole gradients and send nothing
Units.settle         at a window's end: what was held is reduced; gradients of modules left alone are averaged
Units.reshard        only the shards are left: after evaluation, and after an optimizer step
whole_parameters     for a while, parameters are whole plain tensors
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.parallel import gloo
from paceline.parallel.sync_batch_norm import SyncBatchNorm
from paceline.world.sharded import is_sharded, whole

_CHUNK = 32 << 20  # bytes that are flattened at once


class Units:
    """The FSDP2 modules of one model, and what they leave out.

    Args:
        model: the root, after `fully_shard` or `replicate`.
        group: over which gradients are averaged.
        alone: parameters that FSDP2 does not see; their gradients are averaged here.
        keeps: whether parameters stay whole between the micro-batches of a window.
    """

    def __init__(self, model: Any, group: Any, alone: Iterable[nn.Parameter] = (), keeps: bool = False) -> None:
        self._model = weakref.ref(model)
        self._group, self._alone, self._keeps = group, list(alone), keeps
        self._held = 0
        self._statistics = [
            buffer
            for module in model.modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))
            for buffer in module.buffers(recurse=False)
        ]
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)

    @property
    def model(self) -> Any:
        """The root."""
        return self._model()

    def _before_forward(self, model: Any, args: Any) -> None:
        """Forgets a pass that an exception ended midway; FSDP2 would take this one for its continuation."""
        context = model._get_fsdp_state()._state_ctx
        if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
            model.reset_iter_state()

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.reshard()  # no backward pass will

    def reshard(self, *_: Any) -> None:
        """Gives up whole parameters that some unit still holds: they would be stale once the shards change."""
        for unit in _units(self.model):
            unit.reshard()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While it is open, backward passes accumulate whole gradients without communication."""
        self._held += 1
        self._sync(False)
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._sync(True)

    def _sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)
        if self._keeps:
            self.model.set_reshard_after_backward(on)

    def settle(self) -> None:
        """Reduces gradients that were held, and averages those of modules left alone. Ranks: all of the group.

        Nothing happens while `hold` is open, or where every gradient was reduced during the last backward pass.
        """
        if self._held:
            return
        state = self.model._get_fsdp_state()
        groups = [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
        if any(_outstanding(group) for group in groups):
            self.model.set_is_last_backward(True)
            self._sync(True)
            for group in reversed(groups):  # in one order on all ranks
                group.post_backward()
            state._root_post_backward_final_callback()
        if self._alone:
            average_gradients(self._alone, self._group)
        if self._statistics and self.model.training:
            broadcast_tensors(self._statistics, self._group)


def _units(model: nn.Module) -> Iterable[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def refresh(model: nn.Module) -> None:
    """Lets every unit take up parameters that were put in the place of its own."""
    for unit in _units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def _outstanding(group: Any) -> bool:
    """Whether a parameter group holds gradients that no communication has seen."""
    return any(
        parameter.unsharded_accumulated_grad is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for parameter in group.fsdp_params
    )


# -- values and gradients ------------------------------------------------------------------------------------------------


def broadcast_values(model: nn.Module, group: Any) -> None:
    """Gives every rank of the group the first one's parameters and buffers, a few MiB at a time.

    Where ranks hold parts already (tensor parallel), the group must consist of ranks that hold the same part.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    broadcast_tensors([tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors], group)


def broadcast_tensors(tensors: list[torch.Tensor], group: Any) -> None:
    """The first rank's tensors for all, in place. Ranks: all of the group."""
    if tensors:
        with torch.no_grad():
            dist._broadcast_coalesced(group, tensors, _CHUNK, 0)


def average_gradients(parameters: list[nn.Parameter], group: Any) -> None:
    """Averages gradients that nothing else does; a parameter that some rank did not use counts as zero there.

    Averaging what is equal on all ranks changes nothing, so it does no harm to come here twice.
    Ranks: all of the group.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    device = trained[0].device
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    here = [parameter for parameter, count in zip(trained, used.tolist(), strict=True) if count]
    ranks = dist.get_world_size(group)
    gradients = []
    for parameter in here:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad.to_local() if is_sharded(parameter.grad) else parameter.grad)
    for chunk in _chunks(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in chunk]).div_(ranks)
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(chunk, flat.split([g.numel() for g in chunk]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _chunks(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors of one dtype, of about `_CHUNK` bytes together, in one order on all ranks."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if chunk and (size + tensor.nbytes > _CHUNK or chunk[0].dtype != tensor.dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


# -- whole parameters ----------------------------------------------------------------------------------------------------


def part_of(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of a whole tensor, divided as the DTensor `like` is; needs no communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool) -> Iterator[None]:
    """While it is open, each divided parameter of `model` is a whole plain one. Ranks: all that hold parts.

    Args:
        model: any module; what is not divided stays as it is.
        writeback: each rank takes its part of what was changed inside.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_sharded(parameter)
    ]
    gathered: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module, name, parameter in places:
            if id(parameter) not in gathered:
                gathered[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
            module._parameters[name] = gathered[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in places:
            own = module._parameters[name]
            module._parameters[name] = parameter
            if writeback and own is not None:
                parameter.detach().to_local().copy_(part_of(own.detach(), parameter))


# -- gloo ----------------------------------------------------------------------------------------------------------------


def use_fast_gloo(model: nn.Module, device: torch.device) -> None:
    """Lets every unit gather and reduce through `parallel.gloo`, where the backend is gloo: 2 to 3 times as fast."""
    if device.type != "cpu":
        return
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    class Gather(AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            gloo.all_gather(output_tensor, input_tensor, group).wait()

    class Scatter(ReduceScatter):
        allocate = Gather.allocate  # type: ignore[assignment]

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            gloo.reduce_scatter(output_tensor, input_tensor, group, average=op == dist.ReduceOp.AVG).wait()

    for unit in _units(model):
        unit.set_custom_all_gather(Gather())
        unit.set_custom_reduce_scatter(Scatter())
