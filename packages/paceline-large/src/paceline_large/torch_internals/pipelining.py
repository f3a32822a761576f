"""The private side of `torch.distributed.pipelining`: what a stage does around its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any


@cache
def stage_class() -> Any:
    """torch's `PipelineStage`, of which the first argument is `computing`: opened with "forward" or "backward" around each
    piece that it computes."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def __init__(self, computing: Callable[[str], AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._computing = computing

        def _post_metadata_inference_cleanup(self) -> None:
            """torch drops gradients here, those of an open window too; with the shapes given nothing has added to them."""
            for module in self.submod.modules():
                reshard = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()
            before = [(parameter, parameter.grad) for parameter in self.submod.parameters()]
            super()._post_metadata_inference_cleanup()
            for parameter, gradient in before:
                parameter.grad = gradient

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._computing("forward"):
                return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._computing("backward"):
                return super().backward_one_chunk(*args, **kwargs)

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._computing("backward"):
                return super().backward_weight_one_chunk(*args, **kwargs)

    return Stage
