"""What we rely on of the private side of tensors and operations."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from paceline.torch_internals import dispatch, reductions, tensors
from paceline.world.tree import tensors as tensors_in


def test_views_are_told_from_tensors_of_their_own() -> None:
    x = torch.ones(4, requires_grad=True)
    assert tensors.is_view(x[:2]) and not tensors.is_view(x) and not tensors.is_view(x * 2)


def unchanged(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def test_hooks_on_gradients_are_seen_until_they_are_taken_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not tensors.has_users_gradient_hooks(parameter)
    handle = parameter.register_hook(unchanged)
    assert tensors.has_users_gradient_hooks(parameter) and tensors.has_gradient_hook(parameter, "unchanged")
    assert not tensors.has_gradient_hook(parameter, "another")
    later = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(tensors.gradient_hooks(parameter)) == 2
    handle.remove()
    later.remove()
    assert not tensors.has_users_gradient_hooks(parameter) and not tensors.gradient_hooks(parameter)
    assert not tensors.has_gradient_hook(parameter, "unchanged")


@pytest.mark.filterwarnings("error")
def test_a_tensor_with_a_hook_of_ours_is_pickled_without_a_word() -> None:
    parameter = nn.Parameter(torch.ones(2))
    tensors.hook_gradient(parameter, lambda gradient: 2 * gradient)
    torch.save(parameter, io.BytesIO())
    parameter.sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [2, 2]


def test_hooks_before_accumulation_are_taken_over_and_given_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    called: list[str] = []
    parameter.register_hook(lambda _: called.append("before"))
    others, give_back = tensors.take_over_gradient_hooks(parameter, lambda _: called.append("ours"))
    handle = parameter.register_hook(lambda _: called.append("after"))
    parameter.sum().backward()
    assert called == ["ours"] and len(others) == 2
    for hook in others.values():
        hook(parameter.grad)
    assert called == ["ours", "before", "after"]
    handle.remove()
    assert len(others) == 1
    give_back()
    called.clear()
    parameter.sum().backward()
    assert called == ["before"]


def test_hooks_of_both_kinds_are_listed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert tensors.gradient_hooks(parameter) == []
    hooks = [lambda gradient: gradient, lambda parameter: None]
    parameter.register_hook(hooks[0])
    parameter.register_post_accumulate_grad_hook(hooks[1])
    assert tensors.gradient_hooks(parameter) == hooks


def test_writes_are_counted_also_through_views() -> None:
    tensor = torch.ones(4)
    assert tensors.times_written(tensor) == 0
    tensor[:2].add_(1)
    assert tensors.times_written(tensor) == 1


def test_tensors_are_multiplied_in_place() -> None:
    pair = [torch.ones(2), torch.full((3,), 2.0)]
    tensors.multiply_in_place(pair, 0.5)
    assert pair[0].tolist() == [0.5, 0.5] and pair[1].tolist() == [1.0, 1.0, 1.0]


def test_memory_is_told_apart_on_the_meta_device() -> None:
    one, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert tensors.memory_of(one) == tensors.memory_of(one[1:]) != tensors.memory_of(other)


def test_a_mode_sees_which_tensors_an_operation_writes_to() -> None:
    written = []

    class Mode(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            written.extend(tensors_in(dispatch.written_arguments(func, args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    x, y, out = torch.ones(2), torch.ones(2), torch.empty(2)
    with Mode():
        x.add_(y)
        torch.mul(x, y, out=out)
        torch._foreach_mul_([x, y], 2.0)
        x + y
    assert [id(each) for each in written] == [id(x), id(out), id(x), id(y)]


def test_a_part_becomes_a_dtensor_where_it_lies() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = torch.arange(6.0).view(3, 2)
        made = tensors.dtensor(part, init_device_mesh("cpu", (1,)), (Shard(0),), torch.Size((3, 2)), (2, 1))
        assert made.shape == (3, 2) and made.placements == (Shard(0),)
        assert made.to_local().data_ptr() == part.data_ptr() and made.full_tensor().equal(part)
    finally:
        dist.destroy_process_group()


def test_what_a_node_reduces_to_one_number() -> None:
    logits, targets = torch.randn(4, 3, requires_grad=True), torch.tensor([0, -100, 2, 2])

    def reduction(loss: torch.Tensor) -> tuple[bool, tuple[int, ...], float] | None:
        found = reductions.reduction_of(loss.grad_fn)
        return None if found is None else (found.is_mean, found.sizes, float(found.count))

    functional = torch.nn.functional
    weight = torch.tensor([1.0, 1.0, 2.5])
    assert reduction(functional.cross_entropy(logits, targets)) == (True, (4,), 3)
    assert reduction(functional.cross_entropy(logits, targets, weight=weight)) == (True, (4,), 6)
    assert reduction(functional.cross_entropy(logits, targets, reduction="sum"))[:2] == (False, (4,))
    for loss in (functional.mse_loss, functional.smooth_l1_loss, functional.binary_cross_entropy_with_logits):
        assert reduction(loss(logits[:2], torch.zeros(2, 3))) == (True, (2, 3), 6)
        assert reduction(loss(logits[:2], torch.zeros(2, 3), reduction="sum"))[:2] == (False, (2, 3))
    assert reduction(logits[targets > 0].mean()) == (True, (2, 3), 6)
    assert reduction(logits.sum())[:2] == (False, (4, 3))
    assert reduction(logits[0, 0].clone().sum())[:2] == (False, ())
    assert reduction(logits.sum(dim=1)) is None
    assert reduction(functional.mse_loss(logits, torch.zeros(4, 3), reduction="none")) is None
    for loss in (functional.cross_entropy(logits, targets), functional.mse_loss(logits, torch.zeros(4, 3))):
        node = torch.autograd.grad(loss, logits, create_graph=True)[0].grad_fn
        assert reductions.reduction_of(node) is None
        assert reductions.reduction_of(node.next_functions[0][0] or node) is None


def test_what_a_node_divides_by() -> None:
    values = torch.randn(4, 3, requires_grad=True)
    assert reductions.divisor_of((values.sum() / 4).grad_fn, 0) == 4
    assert reductions.divisor_of((values.sum() * 0.25).grad_fn, 0) == 4
    assert reductions.divisor_of((torch.tensor(0.25) * values.sum()).grad_fn, 1) == 4
    assert reductions.divisor_of((values.sum() + 4).grad_fn, 0) is None


def test_what_hooks_would_bring_back_is_not_read() -> None:
    """A checkpointed layer would be computed again, which may happen once, in the backward pass."""
    values = torch.ones(3, requires_grad=True)
    target = torch.ones(3)

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(inputs, target) / torch.tensor(4.0)

    plain = loss(values).grad_fn
    again = torch.utils.checkpoint.checkpoint(loss, values, use_reentrant=False).grad_fn
    assert reductions.divisor_of(plain, 0) == 4 and reductions.reduction_of(plain.next_functions[0][0]) is not None
    assert reductions.divisor_of(again, 0) is None and reductions.reduction_of(again.next_functions[0][0]) is None


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        return 2 * value if func is torch.Tensor.item else value


def test_tensors_are_seen_as_they_are_behind_a_mode() -> None:
    x = torch.ones(())
    with Doubled():
        assert x.item() == 2
        with tensors.without_torch_function():
            assert x.item() == 1
        assert x.item() == 2


def test_hooks_are_called_for_gradients_that_are_returned_too_and_know_it() -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    seen: list[bool] = []
    leaf.register_hook(lambda gradient: seen.append(dispatch.accumulates(leaf)))
    (leaf * other).sum().backward()
    torch.autograd.backward((leaf * other).sum(), inputs=[leaf])
    assert seen == [True, True]
    # torch names no other way than by the text of an error: one that is worded in another way has to end this pass.
    torch.autograd.grad((leaf * other).sum(), [leaf, other])
    assert seen == [True, True, False]


def test_what_ends_a_pass_is_called_by_no_node() -> None:
    leaf = torch.ones(3, requires_grad=True)
    seen: list[bool] = []
    leaf.register_hook(lambda gradient: seen.append(dispatch.is_in_autograd_node()))
    leaf.register_hook(
        lambda gradient: dispatch.after_backward_pass(lambda: seen.append(dispatch.is_in_autograd_node()))
    )
    leaf.sum().backward()
    assert [*seen, dispatch.is_in_autograd_node()] == [True, False, False]
