"""What becomes fake in a rehearsal and what stays real; arithmetic and values that are looked at."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline_lens.forecast.allocation_trace import AllocationTrace
from paceline_lens.forecast.operation_trace import OperationTrace


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
    assert trace.work.flops == 2 * 2 * 8 * 64 * 64


def test_a_weight_that_is_gathered_in_float8_stays_one(trace):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    with trace:
        trace.fake_module(model)
        weight = model[0].weight
        assert isinstance(weight._tensor, FakeTensor)
        weight._precomputed_scale = torch.ones(())  # else all ranks compare their largest values
        (gathered,), _ = weight.fsdp_pre_all_gather(mesh=None)
    assert gathered.dtype == torch.float8_e4m3fn and gathered.nbytes == 64 * 64


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


def test_work_is_what_operations_compute_and_move(trace):
    with trace:
        layer = nn.Linear(64, 64, bias=False)
        rows = torch.randn(32, 64)
        trace.fake_module(layer)
        trace.work.computations.clear()
        layer(rows).square().sum().backward()
        trace.in_optimizer = True
        layer.weight.detach().mul_(2.0)
    size = 4 * 64 * 64
    counted = trace.work.computations
    product = [(entry.phase, entry.bytes) for entry in counted if entry.flops == 2 * 32 * 64 * 64]
    assert sorted(product) == [("backward", 2 * 4 * 32 * 64 + size), ("forward", 2 * 4 * 32 * 64 + size)]
    in_place = [entry for entry in counted if entry.phase == "optimizer" and entry.bytes]
    assert [(entry.dtype, entry.bytes) for entry in in_place] == [("float32", 2 * size)]
    assert any(not entry.bytes for entry in counted)  # the transposed weight is a view


def test_questions_and_memory_that_nobody_has_written_move_nothing(trace):
    with trace:
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        trace.fake_module(nn.ParameterList([weight]))
        trace.work.computations.clear()
        assert weight.device.type == "cpu" and weight.stride() == (64, 1)
        torch.empty_like(weight)
    assert {entry.bytes for entry in trace.work.computations} <= {0}


def test_what_a_kernel_writes_without_returning_it_counts(trace):
    with trace:
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        trace.fake_module(nn.ParameterList([weight]))
        trace.work.computations.clear()
        torch._foreach_mul_([weight.detach()], 2.0)
    assert sum(entry.bytes * count for entry, count in trace.work.computations.items()) == 2 * 4 * 64 * 64


def test_causal_attention_counts_half_and_lookups_are_tokens(trace):
    with trace:
        model = nn.Embedding(512, 64)
        trace.fake_module(model)
        x = model(torch.zeros(2, 128, dtype=torch.int64)).view(2, 2, 128, 32)
        before = trace.work.flops
        nn.functional.scaled_dot_product_attention(x, x, x)
        whole = trace.work.flops - before
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert trace.work.flops - before - whole == whole // 2
    assert trace.work.tokens == 256
    assert [work.is_attention for work in trace.work.computations if work.flops] == [True, True]
