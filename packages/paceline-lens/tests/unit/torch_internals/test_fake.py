"""What we rely on of fake tensors: a contract a function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline_lens.torch_internals import fake


def test_a_fake_tensor_has_the_form_of_another_and_can_take_its_place() -> None:
    parameter = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16).t())
    mode = FakeTensorMode()
    made = fake.fake_like(parameter, mode)
    assert isinstance(made, FakeTensor)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((6, 4), (1, 6), torch.bfloat16, "cpu")
    assert made.untyped_storage().nbytes() == 48
    made.requires_grad_()
    torch.utils.swap_tensors(parameter, made)
    with mode:
        assert isinstance((parameter * 2).sum(), FakeTensor)


def test_a_parameter_without_values_stays_the_object_that_an_optimizer_holds() -> None:
    parameter = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    assert fake.make_fake(parameter, FakeTensorMode()) is parameter
    assert isinstance(parameter, FakeTensor) and isinstance(parameter, nn.Parameter)
    assert parameter.shape == (8, 8) and not parameter.requires_grad


def test_a_view_of_a_fake_tensor_is_fake_and_shares_its_memory() -> None:
    mode = FakeTensorMode()
    whole = fake.fake_like(torch.ones(4, 6), mode)
    view = fake.fake_view(torch.ops.aten.t.default, whole, mode, (whole,), {})
    assert isinstance(view, FakeTensor) and view.shape == (6, 4) and view.device.type == "cpu"
    assert id(view.untyped_storage()) == id(whole.untyped_storage())


def test_values_that_are_looked_at_are_zero() -> None:
    tensor = fake.fake_like(torch.ones(2, 3), FakeTensorMode())
    with fake.zeros_for_values():
        assert f"{tensor:.2f}" == "0.00" and tensor.numpy().tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(RuntimeError):
        tensor.numpy()


def test_tensors_that_the_mode_remembers_can_be_swapped() -> None:
    mode = FakeTensorMode()
    one = mode.from_tensor(torch.ones(3))
    other = mode.from_tensor(torch.ones(5))
    with fake.swappable(mode):
        torch.utils.swap_tensors(one, other)
    assert one.shape == (5,) and other.shape == (3,)


def test_a_storage_that_was_resized_is_seen() -> None:
    seen: list[int] = []
    tensor = torch.zeros(8)
    with fake.observed_resizes(lambda storage: seen.append(storage.nbytes())):
        tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)
    assert seen == [0]


def test_optimizers_compute_on_all_parameters_at_once() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for parameter in parameters:
        fake.make_fake(parameter, mode)
        parameter.grad = fake.fake_like(parameter, mode)
    optimizer = torch.optim.Adam(parameters)
    called: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names(), fake.grouped_optimizer_kernels():
        optimizer.step()
    assert any(name.startswith("aten::_foreach") for name in called)
    called.clear()
    with Names():
        optimizer.step()
    assert called and not any(name.startswith("aten::_foreach") for name in called)
