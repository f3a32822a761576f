"""Ranks that compute the same samples together (tp, cp) notice that they were given different ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import Accelerator, PacelineError, set_seed
from paceline.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x)


def work(plan):
    outcomes = {}
    for how in ("the rank's seed", "the rank's order", "one seed", "the share's seed", "evaluation"):
        accelerator = Accelerator(cpu=True, plan=plan)
        set_seed(0)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rank = accelerator.process_index
        if how == "the rank's seed":
            set_seed(rank)
        if how == "the share's seed":
            set_seed(0, device_specific=True)
        try:
            for _ in range(5):
                x = torch.randn(2, 8, 16)
                if how == "the rank's order":
                    x = x.roll(rank, 0)
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if how == "evaluation":
                model.eval()
                with torch.no_grad():
                    model(x + rank)
            outcomes[how] = "none"
        except PacelineError as error:
            outcomes[how] = error.code
        accelerator.free_memory()
    return outcomes


@pytest.mark.parametrize("plan", [{"tp": 2}, {"cp": 2}], ids=str)
def test_inputs_of_ranks_that_compute_the_same_samples(plan):
    refused, followed = "inputs-differ", "none"
    assert (
        run_ranks(work, 2, args=(plan,))
        == [
            {
                "the rank's seed": refused,
                "the rank's order": refused,
                "one seed": followed,
                "the share's seed": followed,
                "evaluation": refused,
            }
        ]
        * 2
    )
