"""`engine.offload_states` and `engine.reload_states`: a model that rests gives its device's memory to others, as in RLHF.

DeepSpeed keeps parameters twice where they are computed with in 16 bits. Here they exist once, in float32, so `hp_params` and
`lp_params` are the same tensors. They are moved for `lp_params` alone: a script that lets go of the masters only goes on
computing with the model.

    optim_states              states of the optimizer
    hp_params                 nothing of their own
    lp_params                 parameters, at stage 3 this rank's part of them
    lp_grads                  gradients of an open window; after a step there are none
    contiguous_grad_buffer    nothing: buffers for gradients are freed at the end of each backward pass

Nothing moves where the device is the host, nor what waits there already by `offload_optimizer` or `offload_param`.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals import fsdp as internals
from paceline.world.param_groups import inner_optimizers
from paceline.world.sharded import local
from paceline_doors.absent import refuse


class OffloadDeviceEnum(enum.StrEnum):
    """Where states wait."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """What is moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadedTensors:
    """The tensors of one engine that wait in the host's memory.

    Args:
        model: after `prepare`.
        optimizer: the one inside of the prepared optimizer; None where there is none.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        # Each moved tensor with the device from which it came. Of a DTensor the DTensor itself: FSDP2 may replace its local
        # tensor by a padded one.
        self._moved: list[tuple[Tensor, torch.device]] = []

    def offload(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states to the host.

        Args:
            include: what is moved; None for all.
            device: "none" moves nothing.
            pin_memory: whether the host's memory is page-locked.
            non_blocking: returns before the copies have ended. A tensor must not be read before they have.

        Raises:
            CompatError: `compat-name`, for NVMe.
        """
        if device == OffloadDeviceEnum.nvme:
            refuse(
                "DeepSpeedEngine.offload_states(device='nvme')",
                "states wait in the host's memory, and DeepSpeed itself does not move them to NVMe",
                "write `engine.offload_states(device=OffloadDeviceEnum.cpu)`",
            )
        if device == OffloadDeviceEnum.none:
            return
        for kind, tensors in (
            (OffloadStateTypeEnum.lp_grads, self._gradients()),
            (OffloadStateTypeEnum.lp_params, self._parameters()),
            (OffloadStateTypeEnum.optim_states, self._states()),
        ):
            if include is not None and kind not in include:
                continue
            for tensor in tensors:
                own_part = local(tensor)
                if own_part.device.type != "cpu":
                    self._moved.append((tensor, own_part.device))
                    own_part.data = _on_host(own_part, pin_memory, non_blocking)
        self._take_up_parameters()

    def reload(self, non_blocking: bool = False) -> None:
        """Moves everything back to where it was."""
        for tensor, device in self._moved:
            own_part = local(tensor)
            own_part.data = own_part.detach().to(device, non_blocking=non_blocking)
        self._moved.clear()
        self._take_up_parameters()

    def tensors(self, kind: OffloadStateTypeEnum) -> Iterator[Tensor]:
        """Yields the tensors of one kind; those that are divided as DTensors."""
        if kind == OffloadStateTypeEnum.optim_states:
            yield from self._states()
        elif kind == OffloadStateTypeEnum.lp_grads:
            yield from self._gradients()
        elif kind != OffloadStateTypeEnum.contiguous_grad_buffer:
            yield from self._parameters()

    def _parameters(self) -> Iterator[Tensor]:
        yield from self._model.parameters()

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def _states(self) -> Iterator[Tensor]:
        if self._optimizer is None:
            return
        for optimizer in (self._optimizer, *inner_optimizers(self._optimizer)):
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _take_up_parameters(self) -> None:
        """Lets FSDP2 look for this rank's parts anew: it keeps views of their memory."""
        from torch.distributed.fsdp import FSDPModule  # loads torch's tensors, which take half a second

        for unit in self._model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            unit.reshard()
            for group in internals.parameter_groups(unit):
                for member in internals.group_parameters(group):
                    internals.take_up_sharded_parameter(member)


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Returns the devices on which an engine's states of one kind are."""
    return {local(tensor).device for tensor in model.offloaded.tensors(state)}


def _on_host(tensor: Tensor, pinned: bool, non_blocking: bool) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor.detach(), non_blocking=non_blocking)
