"""What we rely on of the private side of `GradScaler`."""

import torch
from torch import nn

from paceline.torch_internals import grad_scaler


def scaler_and_parameter(gradient: float) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, nn.Parameter]:
    """A scaler at 4, and an optimizer whose parameter has this gradient, scaled."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # the scale is made at the first loss
    parameter.grad = torch.tensor([gradient])
    return scaler, optimizer, parameter


def test_gradients_are_unscaled_and_an_overflow_is_flagged() -> None:
    for gradient, overflow in ((2.0, 0.0), (torch.inf, 1.0)):
        scaler, _, parameter = scaler_and_parameter(gradient)
        (flag,) = grad_scaler.unscale(scaler, [parameter])
        assert flag.item() == overflow and parameter.grad is not None and parameter.grad.item() == gradient / 4


def test_a_flag_decides_whether_the_scaler_steps_also_without_gradients() -> None:
    for overflow in (0.0, 1.0):
        scaler, optimizer, parameter = scaler_and_parameter(2.0)
        grad_scaler.give_flag(scaler, optimizer, torch.tensor(overflow))
        scaler.step(optimizer)  # it unscales nothing more
        assert parameter.item() == (1.0 if overflow else -1.0)
        scaler.update()
        assert scaler.get_scale() == (2.0 if overflow else 4.0)
        parameter.grad = None
        grad_scaler.give_flag(scaler, optimizer, torch.tensor(0.0))
        scaler.step(optimizer)  # without a flag this is an error


def test_a_fused_step_can_leave_the_check_to_the_scaler() -> None:
    for leaves_it in (False, True):
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        if leaves_it:
            grad_scaler.check_before_step(optimizer)
        steps = []
        optimizer.register_step_pre_hook(
            lambda optimizer, *_, steps=steps: steps.append(hasattr(optimizer, "found_inf"))
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        parameter.grad = torch.tensor([torch.inf])
        scaler.step(optimizer)
        assert steps == ([] if leaves_it else [True])
        assert parameter.item() == 1.0
