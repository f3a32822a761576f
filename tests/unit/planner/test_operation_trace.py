"""What becomes fake in a rehearsal and what stays real; arithmetic and values that are looked at."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline.planner.allocation_trace import AllocationTrace
from paceline.planner.operation_trace import OperationTrace


@pytest.fixture
def trace():
    return OperationTrace(AllocationTrace(), FakeTensorMode(allow_non_fake_inputs=True))


def test_a_model_of_any_size_is_built_without_memory(trace):
    with trace:
        layer = nn.Linear(100_000, 100_000)  # 37 GiB
        data = torch.randn(4000)
    assert isinstance(layer.weight, FakeTensor) and isinstance(layer.weight, nn.Parameter)
    assert not isinstance(data, FakeTensor)
    assert trace.allocations.peak().total >= 40_000_000_000


def test_what_a_fake_tensor_touches_is_fake_and_values_are_nought(trace):
    with trace:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        norm = model[1].weight
        trace.fake_module(model)
        assert model[1].weight is norm and isinstance(norm, FakeTensor)  # the same object, so that optimizers keep it
        loss = model(torch.randn(8, 64)).sum()
        loss.backward()
        assert isinstance(loss, FakeTensor) and loss.detach().item() == 0.0
        assert not bool(loss.detach() > 0)
    assert model[0].weight.grad.shape == (64, 64)
    # Forward 2 x 8 x 64 x 64, and as much again for the weight's gradient; the input needs none.
    assert trace.traffic.flops == 2 * 2 * 8 * 64 * 64


def test_after_the_first_prepare_large_new_tensors_are_fake_and_small_ones_are_not(trace):
    trace.fakes_everywhere = True
    with trace:
        large, small = torch.zeros(4096), torch.arange(8)
        drawn = torch.randn(4096, generator=torch.Generator())
        with trace.paused():
            away = torch.zeros(4096)
    assert isinstance(large, FakeTensor)
    assert not any(isinstance(each, FakeTensor) for each in (small, drawn, away))


def test_masks_with_known_values_choose_as_many_rows_as_they_would(trace):
    with trace:
        layer = nn.Linear(64, 64)
        output = layer(torch.randn(6, 64))
        mask = torch.tensor([True, False, True, True, False, False])
        assert output[mask].shape == (3, 64)
