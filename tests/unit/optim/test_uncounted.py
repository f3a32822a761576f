"""Losses that are no means over the samples of their micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.optim import uncounted

logits = torch.randn(4, 3, requires_grad=True)
whole, some = torch.tensor([0, 1, 2, 2]), torch.tensor([0, -100, 2, 2])
each, mask = (2 * logits).relu(), torch.tensor([[1.0], [0.0], [1.0], [1.0]])
weight = torch.tensor([1.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (F.cross_entropy(logits, whole), False),
        (F.cross_entropy(logits, some), True),
        (F.cross_entropy(logits, whole, weight=weight), True),
        (F.cross_entropy(logits, some, reduction="sum"), True),
        (F.cross_entropy(logits, whole, reduction="sum") / 4, False),
        (F.binary_cross_entropy(logits.sigmoid(), logits.detach().sigmoid(), reduction="sum") + 1, True),
        ((2 * logits - 1).relu().square().sum(), True),
        ((2 * logits).relu().sum(1).mean(), False),
        ((2 * logits).relu().T.sum(), False),
        ((logits - 1).square().sum(), False),
        (logits.square().mean() + 0.1 * logits.abs().sum(), False),
        (F.cross_entropy(logits, some, label_smoothing=0.1), True),
        (2 * F.cross_entropy(logits, some) / 3 + logits.square().mean(), True),
        (F.cross_entropy(logits[None].transpose(1, 2), some[None]), True),
        (F.cross_entropy(logits, some, reduction="none").mean(), False),
        (logits.square().mean(), False),
        (each.sum() * (1 / 4), False),
        (torch.tensor(0.25) * each.sum(), False),
        (each.sum() / each.numel(), False),
        (each.sum() / (4 * 784), False),
        (each.view(-1).sum() / 12, False),
        (torch.stack([each.mean(), each.square().mean()]).sum() / 2, False),
        (0.1 * each.sum(), True),
        (each.sum() / 5, True),
        ((each * mask).sum() / mask.sum(), True),
        (0.5 * (each.view(-1)[:8] * mask.repeat(2, 2).view(-1)[:8]).sum() / 5 + each.mean(), True),
        ((each * torch.ones(4, 1)).sum() / torch.ones(4, 1).sum(), False),
        (each[mask[:, 0] > 0].mean(), True),
        (each.sum(0).square().sum() / 3, False),
    ],
)
def test_a_mean_over_some_targets_is_told(loss, is_told, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(uncounted, "warn_once", lambda *words: told.append(words))
    uncounted.look(loss, 1, 4)
    assert bool(told) is is_told
    uncounted.look(loss, 100, 4)
    assert len(told) <= 1


@pytest.mark.parametrize(
    ("loss", "width", "is_told"),
    [
        (each.sum() / 8, 2, True),
        (F.cross_entropy(logits, whole, reduction="sum") / 12, 3, True),
        (each.sum() * (1 / 8) + logits.square().mean(), 2, True),
        (each.sum() / 8, 1, False),
        (0.5 * each.sum() / 4, 2, False),
        (each.sum() / 12, 3, False),  # of all elements
        (each.sum() / (4 * 784), 2, False),
        (logits.abs().sum() / 8, 2, False),  # a penalty
    ],
)
def test_a_sum_that_is_divided_by_the_samples_of_all_ranks_is_told(loss, width, is_told, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(uncounted, "warn_once", lambda kind, text: told.append(text))
    uncounted.look(loss, 1, 4, width)
    assert bool(told) is is_told
    if told:
        assert f"divided by {4 * width}, the number of samples of all processes" in told[0]
