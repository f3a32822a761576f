"""Losses that are no means over the samples of their micro-batch, as the ranks see them when they compare themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.optim import uncounted
from paceline.optim.loss_weights import LossWeights
from paceline.optim.uncounted import SeenLoss

PART, FACTOR, SUM, ITEMS = "only a part", "computed from a number", "is a sum", "no sum over its items"
TOGETHER = "of several samples together"
CONSTANT, GLOBAL = "does not follow", "of all processes together"
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
SOME = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])  # of the samples: 3 of the first 4, 1 of the others
TARGETS = torch.tensor([0, 1, 2, 2, 0, 0, 1, 2])

LOADERS = (object(), object())
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def seen(
    loss: Tensor, rows: int, number: int = 1, window: tuple[int, ...] = (0, 1, 0), items: float | None = None
) -> SeenLoss:
    """What one rank sees of a loss."""
    weights = LossWeights()
    weights.look(loss, number, window, rows, items)
    loss.backward(retain_graph=True)
    weights.passed(1.0)
    (one,) = weights.take()
    return one


def told(by_rank: Sequence[Sequence[SeenLoss]], monkeypatch: pytest.MonkeyPatch, is_sure: bool = False) -> str:
    words: list[str] = []
    monkeypatch.setattr(uncounted, "warn_once", lambda _, text: words.append(text))
    LossWeights().judge(by_rank, is_sure)
    return "; ".join(words)


def of_ranks(loss: Loss, rows: Sequence[int] = (4, 4), items: float = 0, number: int = 1) -> list[list[SeenLoss]]:
    """What ranks see that have so many samples each."""
    torch.manual_seed(number)
    ranks = []
    begin = 0
    weight = torch.randn(2, 3, requires_grad=True)
    for count in rows:
        own = slice(begin, begin + count)
        begin += count
        result = loss(torch.randn(count, 2) @ weight, TARGETS[own], SOME[own])
        ranks.append([seen(result, count, number, items=items or None)])
    return ranks


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y, m: F.cross_entropy(z, y), ""),
        (lambda z, y, m: F.cross_entropy(z, y, label_smoothing=0.1), ""),
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0), PART),
        (lambda z, y, m: F.cross_entropy(z, y, weight=WEIGHT), PART),
        (lambda z, y, m: 2 * F.cross_entropy(z, y, ignore_index=0) / 3 + z.square().mean(), PART),
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1), PART),
        (lambda z, y, m: F.cross_entropy(z[None].transpose(1, 2), y[None], ignore_index=0), PART),
        (lambda z, y, m: F.cross_entropy(z[m > 0], y[m > 0]), PART),
        (lambda z, y, m: F.mse_loss(z[m > 0], z.detach()[m > 0]), PART),
        (lambda z, y, m: F.smooth_l1_loss(z[m > 0], z.detach()[m > 0] - 2), PART),
        (lambda z, y, m: F.huber_loss(z.masked_select(m[:, None] > 0), torch.zeros(3 * int(m.sum()))), PART),
        (lambda z, y, m: z[m > 0].mean(), PART),
        (lambda z, y, m: z.repeat(1, 1 + int(m.sum()) // 2).mean(), PART),  # padded to another length
        (lambda z, y, m: (z.relu() * m[:, None]).sum() / m.sum(), PART),
        (lambda z, y, m: (z.relu() * m[:, None]).sum() / len(z), ""),
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0, reduction="none").mean(), ""),
        (lambda z, y, m: z[(y != 1) | (m > 0)].mean() + z.mean(), PART),
        (lambda z, y, m: z[:2].mean(), ""),
        (lambda z, y, m: z.square().mean().sqrt(), FACTOR),
        (lambda z, y, m: z.exp().mean().log(), FACTOR),
        (lambda z, y, m: z.mean() + (z.mean() / z.square().mean()).detach() * z.square().mean(), FACTOR),
        (lambda z, y, m: (z.sigmoid() * m[:, None]).sum() / (z.sigmoid().sum() + m.sum()), FACTOR),
        (lambda z, y, m: torch.stack([z.mean(), z.square().mean()]).sum() / 2, ""),
        (lambda z, y, m: F.relu(z.mean()), FACTOR),
        (lambda z, y, m: z.relu().sum(0).square().sum() / 3, TOGETHER),
        (lambda z, y, m: (z - m[:, None]).norm(), TOGETHER),
        (lambda z, y, m: z.var(0).clamp(min=0.1).sum(), TOGETHER),
        (lambda z, y, m: z.amax(0).mean() + z[:, 0].median(), TOGETHER),
        (lambda z, y, m: z.softmax(0)[:, 0].max(), TOGETHER),
        (lambda z, y, m: z.square().sum(1).topk(2).values.mean(), TOGETHER),
        (lambda z, y, m: 1 - F.cosine_similarity(z[:, 0], z.detach()[:, 1], dim=0), TOGETHER),
        (lambda z, y, m: (z.T @ z / len(z) - torch.eye(3)).square().sum(), TOGETHER),
        (lambda z, y, m: (torch.einsum("bi,bj->ij", z, z) / len(z)).square().sum(), TOGETHER),
        (lambda z, y, m: -torch.special.entr(z.softmax(1).mean(0)).sum(), TOGETHER),
        (lambda z, y, m: F.mse_loss((z - z.min()) / (z.max() - z.min()), m[:, None].expand(-1, 3)), TOGETHER),
        (lambda z, y, m: torch.zeros(3, 3).index_add(0, y, z).square().sum(), TOGETHER),
        (lambda z, y, m: z.sum(0).norm() / 9, TOGETHER),
        (lambda z, y, m: (z.T @ z).trace() / len(z), ""),
        (lambda z, y, m: F.cross_entropy(torch.stack([row.expand(4, 3).relu().mean(0) for row in z]), y), ""),
        (lambda z, y, m: torch.stack([row.expand(1 + k, 3).relu().mean() for row, k in zip(z, y, strict=True)]).mean(), ""),
        (lambda z, y, m: z.square().mean(0).sum(), ""),
        (lambda z, y, m: z.norm(dim=1).mean() + z.logsumexp(1).mean() + z.softmax(1).amax(1).mean(), ""),
        (lambda z, y, m: F.normalize(z).square().sum(1).mean(), ""),
    ],
)  # fmt: skip
def test_what_counts_more_on_one_rank_is_told(loss: Loss, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(of_ranks(loss), monkeypatch)
    assert bool(text) is bool(words)
    assert words in text and (not text or "test_uncounted.py" in text)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y, m: z.relu().sum(), SUM),
        (lambda z, y, m: 0.1 * z.relu().sum(), SUM),
        (lambda z, y, m: F.cross_entropy(z, y, reduction="sum"), SUM),
        (lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / len(z), ""),
        (lambda z, y, m: z.relu().sum() / 5, CONSTANT),
        (lambda z, y, m: z.relu().sum() * (1 / len(z)), ""),
        (lambda z, y, m: torch.tensor(1 / len(z)) * z.relu().sum(), ""),
        (lambda z, y, m: z.relu().sum() / z.numel(), ""),
        (lambda z, y, m: z.relu().view(-1).sum() / z.numel(), ""),
        (lambda z, y, m: z.relu().sum() / (len(z) * 784), ""),
        (lambda z, y, m: z.relu().sum(1).mean(), ""),
        (lambda z, y, m: z.relu().sum(0).mean(), SUM),
    ],
)  # fmt: skip
def test_a_sum_that_is_not_divided_by_its_samples_is_told(
    loss: Loss, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(of_ranks(loss), monkeypatch, is_sure=True)
    assert bool(text) is bool(words) and words in text


@pytest.mark.parametrize(
    ("divisor", "rows", "is_sure", "words"),
    [
        (lambda rows: 8, [(4, 4)], True, GLOBAL),
        (lambda rows: 8, [(4, 4)], False, ""),  # it could be twice the number of samples
        (lambda rows: 2 * rows, [(4, 4), (2, 2)], True, ""),
        (lambda rows: 8, [(4, 4), (2, 2)], False, CONSTANT),
        (lambda rows: 8, [(4, 3)], False, CONSTANT),
        (lambda rows: 16, [(4, 4)], True, ""),
        (lambda rows: 16, [(4, 4), (3, 2)], False, CONSTANT),
        (lambda rows: 6, [(2, 2, 2)], False, GLOBAL),
        (lambda rows: rows, [(4, 3), (2, 2)], True, ""),
    ],
)  # fmt: skip
def test_a_divisor_that_does_not_follow_the_samples_is_told(divisor, rows, is_sure, words, monkeypatch) -> None:
    by_rank: list[list[SeenLoss]] = [[] for _ in rows[0]]
    for number, counts in enumerate(rows, 1):
        passes = of_ranks(lambda z, y, m: z.relu().sum(1).sum() / divisor(len(z)), counts, number=number)
        for own, of_pass in zip(by_rank, passes, strict=True):
            own += of_pass
    text = told(by_rank, monkeypatch, is_sure)
    assert bool(text) is bool(words) and words in text


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: w.square().sum(),
        lambda w: 0.1 * w.abs().sum() / 8,
        lambda w: (w @ w.T).square().sum(),
        lambda w: w[:4].abs().sum(),
        lambda w: w.norm() + w.var(0).sum() + w.max() + (w.T @ w - torch.eye(3)).norm(),
    ],
)
def test_a_penalty_on_weights_is_no_loss(penalty: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    for rows in ((4, 4), (4, 3)):
        ranks = [[seen(penalty(weight), count)] for count in rows]
        assert told(ranks, monkeypatch, is_sure=True) == ""


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0, reduction="sum"), ""),
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0) * (y != 0).sum(), ""),
        (lambda z, y, m: F.cross_entropy(z, y, ignore_index=0), ITEMS),
    ],
)  # fmt: skip
def test_a_mean_with_num_items_is_told(loss: Loss, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(of_ranks(loss, items=4), monkeypatch)
    assert bool(text) is bool(words) and words in text


@pytest.mark.parametrize(
    ("items", "rows", "is_told"),
    [(8, (4, 4), False), (8, (4, 3), True), (7, (4, 4), True), (3, (4, 3), False)],
    ids=["as many tokens in each", "all samples of a pass", "no multiple", "a mask"],
)
def test_a_number_of_items_that_does_not_follow_the_samples_is_told(
    items: int, rows: tuple[int, int], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = of_ranks(lambda z, y, m: F.cross_entropy(z, y, reduction="sum"), rows, items=items)
    assert bool(told(ranks, monkeypatch)) is is_told


def test_a_part_in_the_micro_batches_of_one_window_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(4, 3, requires_grad=True).sigmoid()
    three = seen(values[:3].mean(), 4)
    two = seen(values[:2].mean(), 4, number=2)
    other_window = seen(values[:2].mean(), 4, number=2, window=(0, 2, 0))
    annealed = seen(0.5 * values[:3].mean(), 4, number=2)
    assert PART in told([[three, two]], monkeypatch)
    assert told([[three, other_window]], monkeypatch) == ""
    assert told([[three, annealed]], monkeypatch) == ""


@pytest.mark.parametrize(
    ("rows", "size", "parts_of_row", "words"),
    [(3, 2, 1, "pieces of a micro-batch"), (4, 2, 1, ""), (4, 4, 1, ""), (3, 6, 4, "")],
)
@pytest.mark.parametrize("has_two_loaders", [False, True])
def test_pieces_of_a_micro_batch_with_different_numbers_of_samples_are_told(
    rows: int, size: int, parts_of_row: int, words: str, has_two_loaders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several parts of each row, pieces are images in two sizes: so many parts belong to each sample."""
    weight = torch.ones(2, 3, requires_grad=True)
    found = []
    numbers = [size, 3 * size] if parts_of_row > 1 else [len(piece) for piece in torch.ones(rows).split(size)]
    for number, count in enumerate(numbers):
        weights = LossWeights()
        loss = (torch.ones(count, 2) @ weight).mean() / 2
        loader = LOADERS[number if has_two_loaders else 0]
        source = SimpleNamespace(place=lambda: (1, 12), loader=loader)  # two loaders may be at the same place
        weights.look(loss, number + 1, (0, number, 0), rows, None, source)
        loss.backward()
        weights.passed(1.0)
        found += weights.take()
    text = told([found, found], monkeypatch)
    words = "" if has_two_loaders else words
    assert bool(text) is bool(words) and words in text


@pytest.mark.parametrize(
    ("divide", "steps", "is_told"),
    [
        (lambda z: z.relu().mean() / 4, 4, True),
        (lambda z: (z.relu().mean() + 0.1 * z.square().mean()) / 4, 4, True),
        (lambda z: z.relu().mean() / 4 + z.square().mean(), 4, False),
        (lambda z: (z.relu().mean() + z.square().mean()) / 2, 2, False),  # the mean of two losses
        (lambda z: 0.5 * z.square().mean(), 2, False),
        (lambda z: z.relu().mean() / 4, 1, False),
    ],
)
def test_a_loss_that_is_divided_by_the_micro_batches_of_a_window_is_told(
    divide: Callable[[Tensor], Tensor], steps: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = LossWeights()
    loss = divide(torch.ones(3, 2) @ torch.ones(2, 3, requires_grad=True))
    weights.look(loss, 1, (0, 1, 0), 3, steps=steps)
    loss.backward()
    weights.passed(1.0)
    assert ("takes the mean over the window by itself" in told([weights.take()], monkeypatch)) is is_told


def test_the_first_passes_those_with_other_rows_and_those_before_a_comparison_are_looked_at() -> None:
    weights = LossWeights()
    for number, rows in enumerate([4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3], 1):
        loss = torch.ones(2, requires_grad=True).mean()
        weights.look(loss, number, (0, number, 0), rows)
        loss.backward()
        weights.passed(1.0)
    assert [each.number for each in weights.take()] == [1, 2, 3, 4, 7, 8, 16]
