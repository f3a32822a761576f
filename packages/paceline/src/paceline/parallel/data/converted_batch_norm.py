"""`converted_batch_norm`: layers that `nn.SyncBatchNorm.convert_sync_batchnorm` has made become batch norms on the CPU.

torch's `nn.SyncBatchNorm` refuses the CPU, on one process, too. The statistics over several ranks are those of `batch_norm.py`.
On an accelerator the layers stay torch's.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.plan.plan import Plan
from paceline.torch_internals.modules import BatchNormBase
from paceline.world.forward import rebind_forward


class ConvertedBatchNorm(BatchNormBase):
    """A layer that was a `nn.SyncBatchNorm`. It takes any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")


class ConvertedBatchNorms(Strategy):
    """Synchronised batch norms of a script, on the CPU."""

    name = "converted_batch_norm"
    stage = 34

    def wanted(self, plan: Plan) -> bool:
        """Wanted under every plan."""
        return True

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Gives the layers another class, in place."""
        for module in model.modules():
            is_converted = type(module) is nn.SyncBatchNorm
            if is_converted and context.device.type == "cpu":
                module.__class__ = ConvertedBatchNorm
                # `tensor` has put its own around the forward of the class that it was.
                rebind_forward(module, nn.SyncBatchNorm.forward, BatchNormBase.forward)
        return AppliedStrategy(model)


STRATEGY = ConvertedBatchNorms()
