"""What we rely on of the private side of `GradScaler`."""

import torch
from torch import nn

from paceline.torch_internals import grad_scaler


def unscaled(gradient: float | None) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, nn.Parameter]:
    """A scaler at 4 and its optimizer, which has this gradient, scaled; or none."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # the scale is made at the first loss
    if gradient is not None:
        parameter.grad = torch.tensor([gradient])
    scaler.unscale_(optimizer)
    return scaler, optimizer, parameter


def test_a_flag_decides_whether_the_scaler_steps() -> None:
    for overflow in (0.0, 1.0):
        scaler, optimizer, parameter = unscaled(2.0)
        (flag,) = grad_scaler.overflow_flags(scaler, optimizer).values()
        assert flag.item() == 0.0
        flag.fill_(overflow)
        scaler.step(optimizer)
        assert parameter.item() == (1.0 if overflow else 0.5)


def test_an_optimizer_without_gradients_may_have_a_flag_too() -> None:
    scaler, optimizer, _ = unscaled(None)
    assert grad_scaler.overflow_flags(scaler, optimizer) == {}
    grad_scaler.set_overflow_flag(scaler, optimizer, torch.ones(()))
    scaler.step(optimizer)  # without a flag this is an error
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_a_forgotten_optimizer_is_unscaled_again() -> None:
    scaler, optimizer, parameter = unscaled(4.0)
    grad_scaler.forget(scaler, optimizer)
    scaler.unscale_(optimizer)  # twice is an error otherwise
    assert parameter.grad is not None and parameter.grad.item() == 0.25


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
