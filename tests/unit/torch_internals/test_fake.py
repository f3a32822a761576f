"""What we rely on of fake tensors: a contract a function."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline.torch_internals import fake


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
