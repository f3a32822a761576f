"""What we rely on where other ranks exist only as a number: a contract a function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from paceline_lens.torch_internals import imaginary


@pytest.fixture
def group() -> Iterator[None]:
    imaginary.join_imaginary_group(8)
    yield
    dist.destroy_process_group()


def test_this_process_is_the_first_of_many(group: None) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (0, 8)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1, 1, 1]


def test_a_stage_takes_its_outputs_form_for_that_of_the_gradients(group: None) -> None:
    with imaginary.without_stage_messages():
        stage = PipelineStage(
            nn.Linear(4, 2), 0, 8, torch.device("cpu"), input_args=torch.ones(3, 4), output_args=torch.ones(3, 2)
        )
        if not hasattr(stage, "_send_meta"):  # torch 2.11: there is nothing to replace
            return
        assert stage._send_meta(None, 1) is None
        assert stage._recv_meta(1).backward_metas == stage._stage_meta.outputs
        later = PipelineStage(
            nn.Linear(4, 2), 2, 8, torch.device("cpu"), input_args=torch.ones(3, 4), output_args=torch.ones(3, 2)
        )
        assert later._recv_meta(1).forward_metas[0].shape == (3, 4)
    assert "_send_meta" in vars(PipelineStage) and PipelineStage._send_meta.__name__ == "_send_meta"
