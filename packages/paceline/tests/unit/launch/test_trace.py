"""What stands in the traceback of a script that failed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.launch.worker.traceback_text import traceback_text
from paceline.parallel.whole_answers import answer_for_whole_tensors


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_operator_of_a_library_that_met_a_divided_tensor_is_explained() -> None:
    text = traceback_text(
        raised(RuntimeError("mylib.step.default: got mixed torch.Tensor and DTensor, need to convert"))
    )
    assert "[shard-operation]" in text


def test_other_errors_stay_as_they_are() -> None:
    assert traceback_text(raised(RuntimeError("no"))).endswith("RuntimeError: no\n")


def write_a_row(layer: nn.Module) -> None:
    layer.weight.data[0] = 0.0


@pytest.mark.parametrize("answers", [False, True], ids=["torch's", "ours"])
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_an_operation_that_a_divided_parameter_does_not_have_is_explained(answers: bool) -> None:
    if answers:
        answer_for_whole_tensors()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)]))
        try:
            write_a_row(layer)
        except (RuntimeError, NotImplementedError) as error:
            assert "shard-operation" in traceback_text(error)
        else:  # as with torch 2.15
            assert layer.weight.full_tensor().tolist() == [[0.0] * 3, [1.0] * 3]
    finally:
        dist.destroy_process_group()
