"""Process groups of which only this process exists. Whatever torch would ask the other ranks has to be left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from paceline.torch_internals.replaced import replaced


def join_imaginary_group(world_size: int) -> None:
    """Makes the default group, in which this process is rank 0 of `world_size`. Collectives do not change their tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@contextmanager
def without_stage_messages() -> Iterator[None]:
    """Keeps stages of a pipeline from sending shapes to each other, inside the context.

    Inputs have the shapes that the stage was made with, and gradients have those of the outputs.
    """
    from torch.distributed.pipelining import stage as stages

    # Up to torch 2.11, stages that are made with the shapes of their inputs and outputs send each other none.
    if not hasattr(stages, "_StageBackwardMeta"):
        yield
        return
    PipelineStage = stages.PipelineStage

    def receive(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return stages._StageForwardMeta(forward_metas=stage._user_meta.inputs)
        return stages._StageBackwardMeta(backward_metas=stage._stage_meta.outputs)

    with (
        replaced(PipelineStage, "_send_meta", lambda *args: None),
        replaced(PipelineStage, "_recv_meta", receive),
    ):
        yield
