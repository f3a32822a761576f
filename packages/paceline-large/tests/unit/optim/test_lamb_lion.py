"""Lamb and Lion against their formulas, and Lamb on divided parameters."""

from __future__ import annotations

import torch

from paceline_large.optim.lamb import Lamb
from paceline_large.optim.lion import Lion


def losses(weight: torch.Tensor) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(weight.shape, generator=draw, dtype=weight.dtype) for _ in range(4)]


def test_lion() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    mine, mean = weight.detach().clone(), torch.zeros(6, dtype=torch.float64)
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in losses(mine):
        weight.grad = gradient
        optimizer.step()
        mine = mine * (1 - 0.1 * 0.5) - 0.1 * torch.sign(0.9 * mean + 0.1 * gradient)
        mean = 0.99 * mean + 0.01 * gradient
    assert torch.allclose(weight, mine, atol=1e-12)
    assert optimizer.step(lambda: torch.ones(())) == 1


def test_lamb() -> None:
    for corrected, inside in ((True, False), (False, True)):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
        still = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        mine, mean, square = weight.detach().clone(), 0.0, 0.0
        optimizer = Lamb([weight, still], lr=0.1, weight_decay=0.5, bias_correction=corrected, eps_inside_sqrt=inside)
        for step, gradient in enumerate(losses(mine), 1):
            weight.grad, still.grad = gradient, torch.zeros(2, dtype=torch.float64)
            optimizer.step()
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            root = (square + 1e-8).sqrt() if inside else square.sqrt() + 1e-8
            direction = mean / root + 0.5 * mine
            size = 0.1 * ((1 - 0.999**step) ** 0.5 / (1 - 0.9**step) if corrected else 1.0)
            mine = mine - size * (mine.norm() / direction.norm()).clamp(0.01, 10.0) * direction
        assert torch.allclose(weight, mine, atol=1e-12) and not still.any()
        assert optimizer.step(lambda: torch.ones(())) == 1
