"""What we rely on of torch's dispatcher: a contract a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from paceline.torch_internals import dispatch
from paceline_lens.torch_internals import fake, operations


class Names(dispatch.TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(operation)
        self.arguments.append(args)
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_mode_sees_operations_but_for_those_that_are_kept_from_it() -> None:
    with Names() as names:
        torch.ones(2) + 1
        with dispatch.without_modes():
            torch.ones(2) * 2
    assert [operation.name() for operation in names.operations] == ["aten::ones", "aten::add.Tensor"]
    assert operations.overloads_of(names.operations[1]) is torch.ops.aten.add


def test_a_fake_mode_that_is_entered_is_known() -> None:
    assert not operations.is_in_fake_mode()
    with FakeTensorMode():
        assert operations.is_in_fake_mode()


def test_classes_that_wrap_tensors_and_parameters_that_do_not() -> None:
    assert operations.has_wrapper([torch.Tensor, DTensor]) and not operations.has_wrapper([torch.Tensor])
    parameter = nn.Parameter(torch.ones(2))
    assert dispatch.is_plain(parameter) and not dispatch.is_plain(torch.ones(2))
    assert dispatch.is_plain(fake.make_fake(parameter, FakeTensorMode()))


def test_a_tensor_without_values_is_known() -> None:
    assert not dispatch.has_no_values(torch.ones(2))
    assert dispatch.has_no_values(torch.ones(2, device="meta"))
    assert dispatch.has_no_values(fake.fake_like(torch.ones(2), FakeTensorMode()))


def test_a_composite_operation_runs_as_its_parts() -> None:
    with torch.inference_mode(), Names() as names:
        out = operations.taken_apart(torch.ops.aten.linear.default, (torch.ones(2, 3), torch.ones(4, 3)), {})
    assert out.shape == (2, 4)
    assert "aten::linear" not in [operation.name() for operation in names.operations]
    assert operations.taken_apart(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}) is NotImplemented


def test_operators_that_torch_may_rename_are_there() -> None:
    attention = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu")
    recurrent = ("mkldnn_rnn_layer", "_cudnn_rnn")
    for name in (*attention, *recurrent):
        assert dispatch.aten(name).default and dispatch.aten(f"{name}_backward").default
    assert dispatch.aten("_local_scalar_dense").default and dispatch.aten("_unsafe_view").default


def test_views_and_what_an_operation_writes_to() -> None:
    aten = torch.ops.aten
    assert operations.is_view(aten.t.default) and operations.is_view(aten.expand.default)
    assert not operations.is_view(aten.add.Tensor) and not operations.is_view(aten.add_.Tensor)
    one, other = torch.zeros(2), torch.ones(2)
    assert dispatch.written_arguments(aten.add.Tensor, (one, other), {}) == []
    assert dispatch.written_arguments(aten.add_.Tensor, (one, other), {})[0] is one
    assert dispatch.written_arguments(aten.add.out, (other, other), {"out": one})[0] is one
    tensors = [one]
    assert dispatch.written_arguments(aten._foreach_mul_.Scalar, (tensors, 2.0), {})[0] is tensors


def test_a_backward_pass_is_known_and_its_end() -> None:
    seen: list[object] = []

    def during(gradient: torch.Tensor) -> None:
        seen.append(dispatch.is_in_backward_pass())
        dispatch.after_backward_pass(lambda: seen.append("end"))

    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(during)
    weight.register_hook(lambda gradient: seen.append("last operation"))
    assert not dispatch.is_in_backward_pass()
    loss.backward()
    assert seen == [True, "last operation", "end"]


def test_the_ranks_of_a_collective_are_read_from_its_arguments(group: None) -> None:
    with Names() as names:
        dist.all_reduce(torch.ones(2))
        torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    ranks = [
        operations.group_ranks(args)
        for operation, args in zip(names.operations, names.arguments, strict=True)
        if "all_reduce" in operation.name() or "allreduce" in operation.name()
    ]
    assert ranks == [[0], [0]]
