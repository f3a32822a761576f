"""What `grad_fn` saves of divisions and reductions."""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline_lens.verify.bare.loss_graph import divisors


def test_divisors_and_the_mean_below():
    x = torch.randn(4, 3, requires_grad=True)
    y = torch.tensor([0, 1, 2, 0])
    mean = functional.mse_loss(x, torch.zeros(4, 3))
    assert divisors(mean) == ([], True)
    assert divisors(mean / 2 / torch.tensor(4.0)) == ([4.0, 2.0], True)
    assert divisors(0.5 * x.mean()) == ([2.0], True)
    assert divisors(functional.cross_entropy(x, y) / 2) == ([2.0], True)
    assert divisors(functional.cross_entropy(x, y, reduction="sum") / 2) == ([2.0], False)
    assert divisors(x.sum()) == ([], False)
    # A product of two losses, or by zero, says nothing.
    assert divisors(x.mean() * x.sum())[1] is False
    assert divisors(x.mean() * 0) == ([], False)
