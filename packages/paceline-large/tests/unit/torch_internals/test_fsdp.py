"""What we rely on of FSDP2's private names: one contract a function. A failing one says what a release of torch changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.torch_internals import fsdp
from paceline_large.torch_internals import shards


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone, over gloo: parameters are sharded, gathered and reduced as ever."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def model(mesh: Any) -> nn.Module:
    """Two units, of which the root holds the second layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model: nn.Module, communicate: bool) -> None:
    model.set_requires_gradient_sync(communicate)
    model(torch.ones(5, 3)).sum().backward()


def groups_of(model: nn.Module) -> list[Any]:
    return [*fsdp.parameter_groups(model), *fsdp.parameter_groups(model[0])]


def parameters_of(model: nn.Module) -> list[Any]:
    return [parameter for group in groups_of(model) for parameter in fsdp.group_parameters(group)]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_groups_hold_the_parameters_of_their_own_modules(model: nn.Module) -> None:
    root, inner = groups_of(model)
    assert fsdp.group_modules(root) == (model,)
    assert fsdp.group_modules(inner) == (model[0],)
    shards = [fsdp.sharded_parameter(parameter) for parameter in fsdp.group_parameters(inner)]
    assert [id(shard) for shard in shards] == [id(parameter) for parameter in model[0].parameters()]


def test_a_whole_parameter_is_there_once_it_was_gathered(model: nn.Module) -> None:
    parameter = parameters_of(model)[0]
    assert fsdp.whole_parameter(parameter) is None
    model.unshard()
    assert fsdp.whole_parameter(parameter) is model[1].weight
    model.reshard()
    assert fsdp.whole_parameter(parameter).shape == model[1].weight.shape


@pytest.mark.parametrize(("rows", "dim"), [(8, 0), (5, 0), (1, 0), (6, 1)])
def test_a_parameter_is_cut_into_the_chunks_that_torch_makes(rows: int, dim: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    parameter = torch.arange(rows * 6).view(rows, 6)
    expected = _fsdp_param._chunk_with_empty(parameter, 3, dim=dim)
    with fsdp.own_chunks_only():
        chunks: Any = _fsdp_param._chunk_with_empty(parameter, 3, dim=dim)
        for rank in range(3):
            # Of an empty chunk FSDP2 reads that alone.
            assert chunks[rank].numel() == expected[rank].numel()
            assert not expected[rank].numel() or torch.equal(chunks[rank], expected[rank])


def test_grad_follows_shards_to_whole_parameters(model: nn.Module) -> None:
    for parameter in parameters_of(model):
        fsdp.let_grad_find(parameter)
    shards = list(model.parameters())
    penalty = shards[0].sum()
    output = model(torch.ones(5, 3)).sum()
    found = torch.autograd.grad(output, shards, retain_graph=True)
    assert [gradient.shape for gradient in found] == [shard.shape for shard in shards]
    (of_shard,) = torch.autograd.grad(penalty, shards[0])
    assert of_shard.full_tensor().eq(1).all()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(x.sum(), shards)
    assert torch.autograd.grad(x.sum(), [x, shards[0]], allow_unused=True)[1] is None
    # Schedules of pipelines ask for places in the graph, which are named tuples.
    place = torch.autograd.graph.get_gradient_edge(x)
    assert torch.equal(torch.autograd.grad((3 * x).sum(), place)[0], torch.full_like(x, 3))
    output.backward()
    torch.testing.assert_close(gradients(model), list(found))


def test_a_call_with_other_tensors_is_told_from_a_model_that_changed(model: nn.Module) -> None:
    parameter = parameters_of(model)[0]  # of the root, which holds the second layer
    seen = []

    def look(*_: object) -> None:
        seen.append(fsdp.is_called_with_another(parameter))
        raise InterruptedError  # before torch, or what answers in its place, computes with the mixture

    model[1].register_forward_pre_hook(look)
    other = model[1].weight.detach()
    with pytest.raises(InterruptedError):
        torch.func.functional_call(model[1], {"weight": other}, (torch.ones(5, 4),))
    assert seen == [True] and not fsdp.is_called_with_another(parameter)
    del model[1].weight
    model[1].weight = other
    assert not fsdp.is_called_with_another(parameter)


def test_what_is_written_into_whole_parameters_reaches_their_shards(model: nn.Module) -> None:
    refused: list[Any] = []
    for group in groups_of(model):
        fsdp.carry_values(group, refused.append, lambda _: None)
    expected = [parameter.full_tensor().clone() for parameter in model.parameters()]
    model.unshard()
    model[0].unshard()
    model[0].weight.data.mul_(2)
    model[0].bias.data = model[0].bias.data + 1
    with torch.no_grad():
        model[1].weight[1:].mul_(3)
    fsdp.unnoticed(model[1].bias).zero_()
    model.reshard()
    model[0].reshard()
    expected[0] *= 2
    expected[1] += 1
    expected[2][1:] *= 3
    torch.testing.assert_close([parameter.full_tensor() for parameter in model.parameters()], expected)
    assert not refused
    backward(model, communicate=True)  # and the memory is that into which FSDP2 gathers
    torch.testing.assert_close([parameter.full_tensor() for parameter in model.parameters()], expected)


def test_values_in_another_dtype_do_not_reach_their_shards(mesh: Any) -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    refused: list[Any] = []
    (group,) = fsdp.parameter_groups(model)
    fsdp.carry_values(group, refused.append, lambda _: None)
    model(torch.ones(5, 3))
    model.weight.data.mul_(2)
    model.reshard()
    assert [fsdp.parameter_name(parameter) for parameter in refused] == ["weight"]


def test_gradients_are_pending_until_they_are_reduced(model: nn.Module) -> None:
    backward(model, communicate=True)
    expected = gradients(model)
    assert [fsdp.pending_gradient(parameter) for parameter in parameters_of(model)] == [None] * 4
    model.zero_grad()
    backward(model, communicate=False)
    shapes = [tuple(fsdp.pending_gradient(parameter).shape) for parameter in parameters_of(model)]
    assert shapes == [(2, 4), (2,), (4, 3), (4,)]
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    model.set_requires_gradient_sync(True)
    fsdp.reduce_pending(model, reversed(groups_of(model)))
    torch.testing.assert_close(gradients(model), expected)
    assert [fsdp.pending_gradient(parameter) for parameter in parameters_of(model)] == [None] * 4
    model.zero_grad()
    backward(model, communicate=True)  # and the next pass begins as if nothing had been
    torch.testing.assert_close(gradients(model), expected)


def test_pending_gradients_can_be_taken_out_and_put_back(model: nn.Module) -> None:
    backward(model, communicate=False)
    pending = [fsdp.pending_gradient(parameter).clone() for parameter in parameters_of(model)]
    for parameter in parameters_of(model):
        fsdp.set_pending_gradient(parameter, None)
    assert [fsdp.pending_gradient(parameter) for parameter in parameters_of(model)] == [None] * 4
    for parameter, gradient in zip(parameters_of(model), pending, strict=True):
        fsdp.set_pending_gradient(parameter, gradient)
    model.set_requires_gradient_sync(True)
    fsdp.reduce_pending(model, groups_of(model))
    torch.testing.assert_close(gradients(model), [pending[2], pending[3], pending[0], pending[1]])


def test_pending_gradients_wait_in_the_dtype_of_the_reduction(mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(3, 2), mesh=mesh, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(5, 3)).float().sum().backward()
    (group,) = fsdp.parameter_groups(model)
    for parameter in fsdp.group_parameters(group):
        gradient = fsdp.pending_gradient(parameter)
        assert gradient.dtype == torch.float32
        fsdp.set_pending_gradient(parameter, gradient * 2)
    model.set_requires_gradient_sync(True)
    fsdp.reduce_pending(model, [group])
    assert model.weight.grad.full_tensor().tolist() == [[10.0] * 3] * 2


def test_a_parameter_without_a_gradient_can_take_part_in_a_reduction(model: nn.Module) -> None:
    backward(model, communicate=False)
    parameter = parameters_of(model)[0]
    fsdp.set_pending_gradient(parameter, None)
    fsdp.add_zero_gradient(parameter)
    assert not fsdp.pending_gradient(parameter).any()
    model.set_requires_gradient_sync(True)
    fsdp.reduce_pending(model, groups_of(model))
    assert not model[1].weight.grad.full_tensor().any()


def test_a_pass_that_failed_midway_is_seen_and_can_be_reset(model: nn.Module) -> None:
    assert not fsdp.left_unfinished(model)
    backward(model, communicate=True)
    assert not fsdp.left_unfinished(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(5, 7))
    assert fsdp.left_unfinished(model)
    fsdp.reset_unfinished(model)
    assert not fsdp.left_unfinished(model)
    backward(model, communicate=True)


def test_callbacks_come_after_the_last_operation_and_around_the_end_of_the_pass(model: nn.Module) -> None:
    seen: list[object] = []
    note = lambda: seen.append(fsdp.left_unfinished(model))  # noqa: E731
    fsdp.call_around_final_callback([model, model[0]], before=note)
    fsdp.call_around_final_callback([model, model[0]], after=note)
    inputs = torch.ones(5, 3, requires_grad=True)
    inputs.register_hook(lambda _: seen.append("last operation"))
    for _ in range(2):
        model(inputs).sum().backward()
    assert seen == ["last operation", True, False] * 2
    assert not fsdp.left_unfinished(model)


def test_communication_goes_through_our_objects(model: nn.Module) -> None:
    gather_class, scatter_class = fsdp.communication_classes()
    events: list[str] = []

    class Gather(gather_class):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            events.append("gather")
            output_tensor.copy_(input_tensor)

    class Scatter(scatter_class):
        allocate = Gather.allocate

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            events.append("scatter")
            output_tensor.copy_(input_tensor)

    for group in groups_of(model):
        fsdp.replace_communication(group, Gather(), Scatter())
        fsdp.call_before_reduction(group, lambda parameters: events.append("before"))
    backward(model, communicate=False)
    assert "before" not in events
    backward(model, communicate=True)
    # On one process torch skips the communication itself, but never what comes before it.
    assert events.count("before") >= 2


def test_before_parameters_are_gathered_the_mode_of_the_script_can_be_seen(model: nn.Module) -> None:
    modes: list[bool] = []
    for group in groups_of(model):
        fsdp.call_before_gathering(group, lambda: modes.append(torch.is_grad_enabled()))
    with torch.no_grad():
        model(torch.ones(5, 3))
    assert set(modes) == {False}
    model.reshard()
    modes.clear()
    model(torch.ones(5, 3))
    assert set(modes) == {True}


def test_parameters_stay_whole_while_they_are_kept_gathered(model: nn.Module) -> None:
    first = parameters_of(model)[2]
    with shards.kept_gathered([model, model[0]]):
        output = model(torch.ones(5, 3))
        assert fsdp.whole_parameter(first) is model[0].weight
        output.sum().backward()
        assert fsdp.whole_parameter(first) is model[0].weight
    model.reshard()
    model[0].reshard()
    model(torch.ones(5, 3))
    assert fsdp.sharded_parameter(first) is model[0].weight  # given up after the forward pass again


def test_parameters_in_the_place_of_shards_are_taken_up_on_request(model: nn.Module) -> None:
    parameter = parameters_of(model)[2]
    replacement = nn.Parameter(fsdp.sharded_parameter(parameter).detach() * 0)
    model[0].weight = replacement
    with fsdp.without_taking_up(parameters_of(model)):
        model[0].load_state_dict({}, strict=False)
        assert fsdp.sharded_parameter(parameter) is not replacement
    fsdp.take_up_sharded_parameter(parameter)
    assert fsdp.sharded_parameter(parameter) is replacement


def test_a_shard_in_other_memory_is_what_is_gathered_and_stepped(model: nn.Module) -> None:
    (group,) = fsdp.parameter_groups(model[0])
    own = fsdp.group_parameters(group)[0]
    shard = fsdp.sharded_parameter(own)
    before = shard.full_tensor()
    memory = torch.zeros_like(shards.shard_memory(own))
    assert shards.move_shard(own, memory) and not shards.move_shard(own, memory)
    assert fsdp.sharded_parameter(own) is shard and torch.equal(memory.view(before.shape), before)
    model(torch.ones(5, 3)).sum().backward()
    assert shards.shard_memory(own) is memory  # FSDP2's first pass has left it there
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(memory.view(before.shape), before)
    memory.zero_()
    assert torch.equal(shard.full_tensor(), torch.zeros_like(before))
