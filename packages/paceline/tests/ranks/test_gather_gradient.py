"""Contrastive learning: a loss over the rows of all processes trains as one process does, and a dropped gradient is told."""

import logging

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_sweep.runs import DATA_PARALLEL, PLANS

from paceline import Accelerator
from paceline.base.errors import TrainError


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return self.image(images), self.text(texts), self.scale.clone()


def loss_of(images, texts, scale):
    logits = scale * nn.functional.normalize(images) @ nn.functional.normalize(texts).T
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def train(plan, width, rows):
    torch.manual_seed(0)
    model = Towers().double()
    images, texts = torch.randn(rows, 4, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(images, texts), 6)
    accelerator = None
    if plan is not None:
        accelerator = Accelerator(cpu=True, split_batches=True, plan=PLANS[plan].settings(width))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        images, texts, scale = model(*batch)
        if accelerator is not None:
            images, texts = accelerator.gather((images, texts), with_gradient=True)
        loss = loss_of(images, texts, scale)
        losses.append(loss.item())
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_a_loss_over_the_whole_batch_equals_one_process(plan, width) -> None:
    if width == 1 and plan != "replicate":
        pytest.skip("one process divides nothing")
    # Of the last batch, two ranks have two rows and one; or three have one row among them.
    rows = 15 if width < 3 else 13
    losses, state = train(None, 1, rows)
    for got, weights in run_ranks(train, width, args=(plan, width, rows)):
        assert got == pytest.approx(losses, abs=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)


def dropped():
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    rows = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        assert not accelerator.gather(rows).requires_grad
    accelerator.gather(rows.detach())
    accelerator.gather((rows.sum(), rows.sum(1)))  # losses for a log
    with pytest.raises(TrainError) as caught:
        accelerator.gather(rows.sum(), with_gradient=True)
    return caught.value.code, sum("with_gradient=True" in message for message in said)


def test_a_dropped_gradient_is_told_once() -> None:
    assert run_ranks(dropped, 2) == [("gather-scalar", 1), ("gather-scalar", 0)]
