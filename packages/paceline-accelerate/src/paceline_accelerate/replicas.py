"""`DistributedDataParallel`: what `prepare` returns for a model whose gradients are averaged, as accelerate does.

Scripts and trainers ask for this class, for `.module` and for `no_sync`. Nothing of torch's reducer is behind it: the strategy
of the model averages (`parallel/data/replicate.py`), and the native `prepare` returns the module itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from paceline.parallel.data.replicate_applied import AveragedGradients


class DistributedDataParallel(TorchDistributedDataParallel):
    """A module around the prepared one.

    Args:
        module: the prepared module.
        applied: the strategy that averages its gradients.
    """

    _applied: AveragedGradients | None

    def __init__(self, module: nn.Module, applied: AveragedGradients) -> None:
        # torch's own constructor would register hooks and broadcast the model.
        nn.Module.__init__(self)
        self.module = module
        self._applied = applied
        self.process_group = applied.form.group
        self.device = next(module.parameters()).device
        self.device_type = self.device.type
        self.device_ids = None if self.device.index is None else [self.device.index]
        self.output_device = None if self.device.index is None else self.device
        self.dim = 0
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.broadcast_buffers = True
        self.find_unused_parameters = self.static_graph = False
        self.gradient_as_bucket_view = True

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls the module."""
        return self.module(*inputs, **keywords)

    def no_sync(self) -> AbstractContextManager[None]:
        """While it is open, gradients are not averaged."""
        return nullcontext() if self._applied is None else self._applied.hold_gradients()

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Lets a communication hook average the gradients from now on."""
        if self._applied is not None:
            from paceline_large.compression.hooks import sending  # few scripts register one

            self._applied.compress(sending(hook, state))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state with the names of the module, as `get_state_dict` returns it, or with `module.` before them."""
        has_prefix = any(name.startswith("module.") for name in state_dict)
        if not has_prefix:
            return self.module.load_state_dict(state_dict, strict, assign)
        return nn.Module.load_state_dict(self, state_dict, strict, assign)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Switches the module to training or evaluation."""
        nn.Module.train(self, mode)
        return self

    def _set_static_graph(self) -> None:
        """Nothing depends on the graph."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_applied": None, "process_group": None}  # a copy communicates nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        group = dist.group.WORLD
        if group is not None:
            self.process_group = group

    def join(self, *args: object, **keywords: object) -> Any:
        """Raises: `accelerator.join_uneven_inputs([model])` does it."""
        raise NotImplementedError("use `accelerator.join_uneven_inputs([model])`")


def as_accelerate_wraps(module: nn.Module, applied: AveragedGradients | None) -> nn.Module:
    """Returns the module as accelerate's `prepare` does on several processes: wrapped if it has something to train."""
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    if applied is None or not is_trained:
        return module
    return DistributedDataParallel(module, applied)
